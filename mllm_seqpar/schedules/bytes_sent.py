"""Formulas for the bytes that one attention call sends.

The transport counts what is sent (`Communicator.bytes`); tests hold the two equal. The table gives the elements that
one of n ranks sends per call, with s_q query rows per rank and, for even shards, s_kv keys per rank (H query heads, G
KV heads, head_dim D):

    LV-XAttn (arXiv 2502.02406)         forward   (n - 1) s_q H D  +  (n - 1) s_q H (D + 1)
                                        backward  (n - 1) s_q H (3 D + 2)
    Ring Attention (arXiv 2310.01889)   forward   2 (n - 1) s_kv G D
                                        backward  4 (n - 1) s_kv G D
    Mesh-Attention, mesh shape (a, b)   forward   (a - 1) s_q H (2 D + 1)  +  2 (b - 1) s_kv G D
                                        backward  (a - 1) s_q H (3 D + 2)  +  4 (b - 1) s_kv G D
    DeepSpeed-Ulysses (arXiv 2309.14509)
                                        forward   (n - 1)/n (2 s_q H D + s_q H + 2 s_kv G D)
                                        backward  (n - 1)/n (2 s_q H D + 2 s_kv G D)

With fewer KV heads than ranks, Ulysses sends each rank the one head that it needs: replace G by n. Complete results
(its O, dQ, dK, dV) are sent in the dtype of the inputs, partial ones (for KV heads that ranks share) as other results
that go straight to their owner.

A result that passes through other ranks, which add their own, is sent in the dtype of the accumulator. For a result
sent directly to its owner (point to point, between two ranks, and in Ulysses), `Problem.direct_element` is the size of
an element.

If a mask hides all keys of some rank from some rows, LV-XAttn sends rows point to point, and only to ranks with a
visible key. With r(i, j) the number of rows of rank i that attend to any key of rank j, rank i then sends

    forward   sum_j r(i, j) H D  +  sum_j r(j, i) H (D + 1)             over all j but i: queries, then results
    backward  sum_j r(i, j) H (2 D + 2)  +  sum_j r(j, i) H D

This equals the ring if every r(i, j) is s_q, and never exceeds it, summed over ranks.

The paper's Ring Attention moves K and V expanded to all query heads, which is G = H here (`expanded`). Its 0.48% for
Video-MME on mPLUG-Owl3-7B is the forward pass with 2-byte Q, K, V and 4-byte O and log-sum-exp: `video_mme`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .head_sharding import HeadShards
from .mesh import MeshShape, OverlapRatios
from .steps import Axis, TransferKind

LSE_BYTES = 4
"""Bytes of a log-sum-exp, and of delta = rowsum(dO * O), which backward sends instead of O."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of a distributed attention, from the view of one rank.

    Attributes:
        rows: query rows of each rank, s_q.
        keys: keys of every rank, s_kv.
        heads, kv_heads, dim: H, G, D.
        batch, key_batch: batch items of q, and of k and v (1 if all items of q share the keys).
        rank: the rank that sends; ranks send different numbers of bytes only if their numbers of keys differ.
        element: bytes per element of q, k, v, o and do.
        accumulated: bytes per element of what is summed over ranks: O forward; dQ, dK, dV backward.
        direct_element: the same for results that go straight to their owner; None: `accumulated`.
    """

    rows: int
    keys: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    batch: int = 1
    key_batch: int = 1
    rank: int = 0
    element: int = 2
    accumulated: int = 4
    direct_element: int | None = None

    @property
    def ranks(self) -> int:
        return len(self.keys)

    def result_element(self, ranks: int, *, direct: bool = False) -> int:
        """Return the bytes per element of results among `ranks` ranks, sent point to point (`direct`) or in a ring."""
        return self.accumulated if self.direct_element is None or not (direct or ranks == 2) else self.direct_element


def sent_tensors(
    problem: Problem,
    mesh_shape: MeshShape,
    kind: TransferKind,
    axis: Axis,
    *,
    backward: bool,
    direct: bool = False,
    length: int | None = None,
) -> dict[str, tuple[int, int]]:
    """Return the tensors of one transfer by label: their elements, and bytes per element.

    `length` is the number of rows or keys of all batch items, by default of the rank that has the most.
    """
    element = problem.element
    if kind == "result":
        element = problem.result_element(mesh_shape[0 if axis == "q" else 1], direct=direct)
    if axis == "kv":
        keys = problem.key_batch * max(problem.keys) if length is None else length
        full = keys * problem.kv_heads * problem.dim, element
        return dict.fromkeys(("k", "v") if kind == "input" else ("dk", "dv"), full)
    rows = (problem.batch * problem.rows if length is None else length) * problem.heads
    full, lse = (rows * problem.dim, element), (rows, LSE_BYTES)
    if kind == "input":
        return {"q": full, "do": full, "lse": lse, "delta": lse} if backward else {"q": full}
    return {"dq": full} if backward else {"o": full, "lse": lse}


def transfer_bytes(*transfer: Any, **options: Any) -> int:
    """Return the bytes of one transfer (`sent_tensors`)."""
    return sum(count * element for count, element in sent_tensors(*transfer, **options).values())


def mesh_bytes(
    problem: Problem,
    mesh_shape: MeshShape,
    *,
    backward: bool,
    visible_rows: Sequence[Sequence[int]] | None = None,
    direct: bool = False,
) -> dict[str, int]:
    """Return the bytes that a mesh sends per rank and call, by label: q, k, v, o, lse; backward q, do, lse, delta, k,
    v, dq, dk, dv.

    The Q group is the a ranks from a * (rank // a), the KV group the b ranks rank % a, rank % a + a, ... A rank sends
    the K and V of all ranks of its KV group but the next one, where they end, and the dK and dV of all but its own.

    Args:
        mesh_shape: (a, b) with a * b ranks; (n, 1) is LV-XAttn and (1, n) Ring Attention.
        visible_rows: with a mask, visible_rows[i][j] is the number of rows of rank i that attend to any key of rank j;
            for (n, 1) only. If batch items share their keys (key_batch 1), it counts the rows of all items, else the
            row numbers that do so in any item. None: every row attends to keys of every rank.
        direct: whether rows are sent point to point; always True with `visible_rows`.
    """
    (a, b), rank, direct = mesh_shape, problem.rank, direct or visible_rows is not None
    kv_index, q_index = divmod(rank, a)
    keys = problem.keys[q_index::a]
    lengths: dict[tuple[TransferKind, Axis], int] = {}  # rows or keys of all transfers
    if a > 1:
        lengths["input", "q"] = lengths["result", "q"] = (a - 1) * problem.batch * problem.rows
    if visible_rows is not None:
        others = [other for other in range(problem.ranks) if other != rank]
        lengths["input", "q"] = sum(visible_rows[rank][j] for j in others) * problem.key_batch
        lengths["result", "q"] = sum(visible_rows[j][rank] for j in others) * problem.key_batch
    if b > 1:
        lengths["input", "kv"] = problem.key_batch * (sum(keys) - keys[(kv_index + 1) % b])
    if b > 1 and backward:
        lengths["result", "kv"] = problem.key_batch * (sum(keys) - keys[kv_index])
    return {
        label: count * element
        for (kind, axis), length in lengths.items()
        for label, (count, element) in sent_tensors(
            problem, mesh_shape, kind, axis, backward=backward, direct=direct, length=length
        ).items()
    }


def lv_xattn_bytes(problem: Problem, **options: Any) -> dict[str, int]:
    """Return the bytes of LV-XAttn; `options` as of `mesh_bytes`."""
    return mesh_bytes(problem, (problem.ranks, 1), **options)


def ring_bytes(problem: Problem, **options: Any) -> dict[str, int]:
    """Return the bytes of Ring Attention; `options` as of `mesh_bytes`."""
    return mesh_bytes(problem, (1, problem.ranks), **options)


def mesh_axis_bytes(problem: Problem, mesh_shape: MeshShape, *, backward: bool) -> tuple[int, int]:
    """Return the bytes that a mesh sends per rank and call in the Q group and in the KV group."""
    sent = mesh_bytes(problem, mesh_shape, backward=backward)
    kv = sum(sent.get(label, 0) for label in ("k", "v", "dk", "dv"))
    return sum(sent.values()) - kv, kv


def overlap_ratios_by_bytes(problem: Problem, *, backward: bool) -> OverlapRatios:
    """Return overlap ratios in proportion to the bytes of each transfer; one block hides the largest.

    This serves as a default if no speeds are known.
    """
    around = replace(problem, direct_element=None)
    q, o, kv, dkv = (
        transfer_bytes(around, (1, 1), kind, axis, backward=backward)
        for axis, kind in product(("q", "kv"), ("input", "result"))
    )
    dkv = dkv if backward else 0
    largest = max(q, kv, o, dkv, 1)
    return OverlapRatios(q=q / largest, kv=kv / largest, o=o / largest, dkv=dkv / largest)


def ulysses_bytes(problem: Problem, mesh_shape: MeshShape = (1, 1), *, backward: bool) -> dict[str, int]:
    """Return the bytes that Ulysses sends per rank and call, by label: q, k, v, o, lse; backward do, dq, dk, dv.

    Args:
        mesh_shape: (a, b) of the hybrid: heads are sharded over groups of u = n / (a b) consecutive ranks, and the
            groups exchange Q and KV as a mesh of this shape.
    """
    size = problem.ranks // (mesh_shape[0] * mesh_shape[1])
    shards = HeadShards(problem.heads, problem.kv_heads, size)
    group, member = divmod(problem.rank, size)
    keys = problem.keys[group * size : (group + 1) * size]
    others = [peer for peer in range(size) if peer != member]
    per_row = problem.batch * problem.rows * (problem.heads // size)
    per_kv_head = problem.key_batch * problem.dim * problem.element
    rows = (size - 1) * per_row * problem.dim * problem.element
    if backward:
        shared = sum(len(shards.kv_heads_of(peer)) for peer in range(size)) > problem.kv_heads
        partial = problem.result_element(size, direct=True)
        per_kv_head = problem.key_batch * problem.dim * (partial if shared else problem.element)
        grads = sum(keys[peer] for peer in others) * len(shards.kv_heads_of(member)) * per_kv_head
        sent = {"do": rows, "dq": rows, "dk": grads, "dv": grads}
    else:
        kv = keys[member] * sum(len(shards.kv_heads_of(peer)) for peer in others) * per_kv_head
        sent = {"q": rows, "k": kv, "v": kv, "o": rows, "lse": (size - 1) * per_row * LSE_BYTES}
    between_groups = replace(problem_between_groups(problem, size), kv_heads=shards.computed_kv_heads(member))
    mesh = mesh_bytes(between_groups, mesh_shape, backward=backward)
    return {label: sent.get(label, 0) + mesh.get(label, 0) for label in sent | mesh}


def problem_between_groups(problem: Problem, head_degree: int) -> Problem:
    """Return the problem that groups of `head_degree` ranks solve after head sharding: longer shards, fewer heads.

    The number of KV heads is that of the member that computes with the most.
    """
    if head_degree == 1:
        return problem
    keys, shards = problem.keys, HeadShards(problem.heads, problem.kv_heads, head_degree)
    return replace(
        problem,
        rows=problem.rows * head_degree,
        keys=tuple(sum(keys[i : i + head_degree]) for i in range(0, len(keys), head_degree)),
        heads=problem.heads // head_degree,
        kv_heads=max(shards.computed_kv_heads(member) for member in range(head_degree)),
        rank=problem.rank // head_degree,
    )


def expanded(problem: Problem) -> Problem:
    """Return the problem with K and V repeated for every query head, as the paper's Ring Attention sends them."""
    return replace(problem, kv_heads=problem.heads)


def video_mme(ranks: int, *, element: int = 2, accumulated: int = 4) -> Problem:
    """Return the paper's Video-MME case: mPLUG-Owl3-7B, 5,514 query rows, 2,386 frames of 729 tokens = 1,739,394 keys.

    Rows are padded to a multiple of `ranks`. Frames are sharded whole; the first ranks hold one more.
    """
    base, extra = divmod(2386, ranks)
    keys = tuple((base + (rank < extra)) * 729 for rank in range(ranks))
    return Problem(
        rows=-(-5514 // ranks), keys=keys, heads=28, kv_heads=4, dim=128, element=element, accumulated=accumulated
    )
