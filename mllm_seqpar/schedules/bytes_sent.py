"""What one attention call sends, as formulas: pure arithmetic, without torch.

The transfer layer counts what is really sent (`Communicator.bytes`); tests hold the two equal. Elements that one of n
ranks sends per call, with s_q rows per rank and, for even shares, s_kv keys per rank (H query heads, G key heads,
head dim D):

    LV-XAttn (arXiv 2502.02406)         forward   (n - 1) s_q H D  +  (n - 1) s_q H (D + 1)
                                        backward  (n - 1) s_q H (4 D + 1)
    Ring Attention (arXiv 2310.01889)   forward   2 (n - 1) s_kv G D
                                        backward  4 (n - 1) s_kv G D

    Mesh-Attention, tile (a, b)         forward   (a - 1) s_q H (2 D + 1)  +  2 (b - 1) s_kv G D
                                        backward  (a - 1) s_q H (4 D + 1)  +  4 (b - 1) s_kv G D
    DeepSpeed-Ulysses (arXiv 2309.14509)
                                        forward   (n - 1)/n (2 s_q H D + s_q H + 2 s_kv G D)
                                        backward  (n - 1)/n (2 s_q H D + 2 s_kv G D)

With fewer key heads than ranks Ulysses sends each rank the one head that it needs: n in the place of G. Results that
are complete (its O, dQ, dK, dV) travel in the inputs' dtype, partial ones (of key heads that ranks share) in the one
that they are summed in.

Where a mask hides whole ranks from some rows, LV-XAttn's rows go straight to the ranks of which they see something, and
nowhere else. With r(i, j) the rows of rank i that see any key of rank j, rank i then sends

    forward   sum_j r(i, j) H D  +  sum_j r(j, i) H (D + 1)             over all j but i: rows out, results home
    backward  sum_j r(i, j) H (3 D + 1)  +  sum_j r(j, i) H D

which is the ring's where every r(i, j) is s_q, and never more, summed over ranks.

The paper's Ring Attention moves K and V expanded to all query heads, which is G = H here (`expanded`). Its 0.48% for
Video-MME on mPLUG-Owl3-7B is the forward pass with 2-byte Q, K, V and 4-byte O and log-sum-exp: `video_mme`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .head_sharding import HeadShards
from .mesh import OverlapRatios


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of a distributed attention, as seen by one rank.

    Attributes:
        rows: query rows of each rank, s_q.
        keys: keys of every rank, s_kv.
        heads, kv_heads, dim: H, G, D.
        batch, key_batch: batch items of q, and of k and v (1 where all items of q share the keys).
        rank: whose bytes are asked for; ranks differ only where their numbers of keys do.
        element: bytes of an element of q, k, v, o and their gradients' inputs.
        accumulated: bytes of an element of what is summed over ranks: O forward, dQ, dK, dV backward.
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

    @property
    def ranks(self) -> int:
        """n."""
        return len(self.keys)


LSE_BYTES = 4


def lv_xattn_bytes(problem: Problem, *, backward: bool, seen: Sequence[Sequence[int]] | None = None) -> dict[str, int]:
    """Bytes that LV-XAttn sends per rank and call, by label: q, o, lse forward; q, o, do, lse, dq backward.

    Args:
        problem: the call.
        backward: which pass.
        seen: with a mask, seen[i][j] = how many rows of rank i see any key of rank j: rows of all batch items where
            they share their keys (key_batch 1), else row numbers that do in any batch item. None: every row sees
            every rank.
    """
    if seen is None:
        ahead = behind = (problem.ranks - 1) * problem.batch * problem.heads * problem.rows
    else:
        others = [rank for rank in range(problem.ranks) if rank != problem.rank]
        ahead = sum(seen[problem.rank][j] for j in others) * problem.key_batch * problem.heads
        behind = sum(seen[j][problem.rank] for j in others) * problem.key_batch * problem.heads
    if not backward:
        return {
            "q": ahead * problem.dim * problem.element,
            "o": behind * problem.dim * problem.accumulated,
            "lse": behind * LSE_BYTES,
        }
    inputs = {name: ahead * problem.dim * problem.element for name in ("q", "o", "do")}
    return inputs | {"lse": ahead * LSE_BYTES, "dq": behind * problem.dim * problem.accumulated}


def ring_bytes(problem: Problem, *, backward: bool) -> dict[str, int]:
    """Bytes that Ring Attention sends per rank and call, by label: k, v forward; k, v, dk, dv backward.

    K and V of all ranks pass through a rank on their way, except those of the rank after it, where they end; dK and dV
    of all ranks, except its own, which end here.
    """
    width = problem.key_batch * problem.kv_heads * problem.dim
    after = (problem.rank + 1) % problem.ranks
    total = sum(problem.keys)
    ahead = (total - problem.keys[after]) * width * problem.element
    sent = {"k": ahead, "v": ahead}
    if backward:
        behind = (total - problem.keys[problem.rank]) * width * problem.accumulated
        sent |= {"dk": behind, "dv": behind}
    return sent


def mesh_bytes(problem: Problem, tile: tuple[int, int], *, backward: bool) -> dict[str, int]:
    """Bytes that a mesh of tile (a, b) sends per rank and call: LV-XAttn's in its Q group, the ring's in its KV group.

    The Q group are the a ranks from a * (rank // a) on, the KV group the b ranks rank % a, rank % a + a, ...
    """
    a, _ = tile
    place, column = divmod(problem.rank, a)
    in_q_group = replace(problem, keys=(0,) * a, rank=column)
    in_kv_group = replace(problem, keys=problem.keys[column::a], rank=place)
    return lv_xattn_bytes(in_q_group, backward=backward) | ring_bytes(in_kv_group, backward=backward)


def overlap_ratios_by_bytes(problem: Problem, *, backward: bool) -> OverlapRatios:
    """What hides a mesh's transfers when nothing is known of speeds: by their bytes, the largest as long as a block."""
    row, key = problem.batch * problem.heads * problem.rows, problem.key_batch * problem.kv_heads * max(problem.keys)
    o = row * (problem.dim * problem.accumulated + (0 if backward else LSE_BYTES))
    q = row * problem.dim * problem.element * (3 if backward else 1) + (row * LSE_BYTES if backward else 0)
    kv, dkv = (2 * key * problem.dim * size for size in (problem.element, problem.accumulated if backward else 0))
    largest = max(q, kv, o, dkv, 1)
    return OverlapRatios(q=q / largest, kv=kv / largest, o=o / largest, dkv=dkv / largest)


def ulysses_bytes(problem: Problem, tile: tuple[int, int] = (1, 1), *, backward: bool) -> dict[str, int]:
    """Bytes that Ulysses sends per rank and call, by label: q, k, v, o, lse forward; do, dq, dk, dv backward.

    Args:
        problem: the call.
        tile: for the hybrid: heads are dealt to groups of u = n / (a b) consecutive ranks, and what one rank then has
            of a group's rows and keys goes by the tile (a, b).
        backward: which pass.
    """
    size = problem.ranks // (tile[0] * tile[1])
    shares = HeadShards(problem.heads, problem.kv_heads, size)
    group, place = divmod(problem.rank, size)
    keys = problem.keys[group * size : (group + 1) * size]
    others = [peer for peer in range(size) if peer != place]
    per_row = problem.batch * problem.rows * (problem.heads // size)
    per_key_head = problem.key_batch * problem.dim * problem.element
    rows = (size - 1) * per_row * problem.dim * problem.element
    if backward:
        shared = sum(len(shares.key_heads(peer)) for peer in range(size)) > problem.kv_heads
        per_key_head = problem.key_batch * problem.dim * (problem.accumulated if shared else problem.element)
        grads = sum(keys[peer] for peer in others) * len(shares.key_heads(place)) * per_key_head
        sent = {"do": rows, "dq": rows, "dk": grads, "dv": grads}
    else:
        out = keys[place] * sum(len(shares.key_heads(peer)) for peer in others) * per_key_head
        sent = {"q": rows, "k": out, "v": out, "o": rows, "lse": (size - 1) * per_row * LSE_BYTES}
    inner = replace(
        problem,
        rows=size * problem.rows,
        keys=tuple(sum(problem.keys[i : i + size]) for i in range(0, problem.ranks, size)),
        heads=problem.heads // size,
        kv_heads=shares.computed_key_heads(place),
        rank=group,
    )
    between = mesh_bytes(inner, tile, backward=backward)
    return {label: sent.get(label, 0) + between.get(label, 0) for label in sent | between}


def expanded(problem: Problem) -> Problem:
    """The same with K and V repeated for every query head, as the paper's Ring Attention moves them."""
    return replace(problem, kv_heads=problem.heads)


def video_mme(ranks: int, *, element: int = 2, accumulated: int = 4) -> Problem:
    """The paper's Video-MME case: mPLUG-Owl3-7B, 5,514 query rows, 2,386 frames of 729 tokens = 1,739,394 keys.

    Rows are padded to a multiple of `ranks`; frames are dealt whole, the first ranks taking one more.
    """
    base, extra = divmod(2386, ranks)
    keys = tuple((base + (rank < extra)) * 729 for rank in range(ranks))
    return Problem(
        rows=-(-5514 // ranks), keys=keys, heads=28, kv_heads=4, dim=128, element=element, accumulated=accumulated
    )
