"""Mesh-Attention: each rank computes a x b attention blocks, of the Q shards of one group and the KV shards of another.

n = a b ranks. The Q group of the rank at position p is the a ranks at the positions from a * (p // a), its KV group
the b ranks at p % a, p % a + a, ... A position is the rank's own number, unless `mesh_ranks` says otherwise.
Block (i, j) belongs to the one rank that is in the Q group of i and in the KV group of j. Within each group, shards
move around a ring one hop at a time, and results return to their owner in the same way. All ranks do the same at the
same step, so the order is found once, with shards numbered by the hops that they take to reach a rank (`mesh_order`; 0
is the rank's own shard), and then translated for one rank (`mesh_schedule`).

The order is a greedy search (Mesh-Attention, section "schedule"). While inputs are missing, the next transfer is the
one that unlocks the most blocks for its cost, and just enough blocks are computed to overlap it. Then each result is
sent as soon as it is complete. Q results go first in the forward pass; the axes alternate in the backward pass. Blocks
that no result waits for (the blocks of the own Q shard; in the backward pass the own block) are computed last, during
the last transfers.

A shard is held from its arrival until its last block. A rank therefore holds at most a - 1 Q shards and b - 1 KV shards
of other ranks at a time, and as many partial results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .steps import AttentionBlock, Axis, Schedule, Step, Transfer, TransferKind

MeshShape = tuple[int, int]
_Result = tuple[Axis, int]
"""The axis and the hop of the shard that a partial result belongs to."""


@dataclass(frozen=True, kw_only=True)
class OverlapRatios:
    """Number of attention blocks that hide one transfer: the time of the transfer over the time of a block.

    Attributes:
        q: inputs along the Q axis (Q; in the backward pass Q, dO, the log-sum-exp and delta).
        kv: K and V.
        o: results along the Q axis (O and the log-sum-exp; dQ in the backward pass).
        dkv: dK and dV, in the backward pass.
        one_link: True if transfers of both axes share a link, False if one of each can run at the same time.
    """

    q: float = 1.0
    kv: float = 1.0
    o: float = 1.0
    dkv: float = 1.0
    one_link: bool = True

    def of(self, kind: TransferKind, axis: Axis) -> float:
        if kind == "input":
            return self.q if axis == "q" else self.kv
        return self.o if axis == "q" else self.dkv


def mesh_schedule(
    mesh_shape: MeshShape, ranks: Sequence[int], rank: int, *, backward: bool, overlap_ratios: OverlapRatios
) -> Schedule:
    """Return the schedule of `rank` for a mesh shape (a, b), both above 1, with the rank at each position."""
    size, own = {"q": mesh_shape[0], "kv": mesh_shape[1]}, ranks.index(rank)
    position = {"q": own % mesh_shape[0], "kv": own // mesh_shape[0]}

    def group_rank(axis: Axis, index: int) -> int:
        index %= size[axis]
        return ranks[own - position["q"] + index if axis == "q" else position["q"] + mesh_shape[0] * index]

    def shard(axis: Axis, hop: int) -> int:
        return group_rank(axis, position[axis] - hop)

    def transfer(t: Transfer) -> Transfer:
        dst, src = (group_rank(t.axis, position[t.axis] + step) for step in (t.dst, t.src))
        return Transfer(t.kind, t.axis, shard(t.axis, t.send_shard), dst, shard(t.axis, t.recv_shard), src)

    return tuple(
        Step(
            tuple(transfer(t) for t in step.transfers),
            tuple(replace(b, q_shard=shard("q", b.q_shard), kv_shard=shard("kv", b.kv_shard)) for b in step.blocks),
        )
        for step in mesh_order(mesh_shape, backward, overlap_ratios)
    )


@lru_cache(maxsize=256)
def mesh_order(mesh_shape: MeshShape, backward: bool, overlap_ratios: OverlapRatios) -> Schedule:
    """Return the order of transfers and blocks that all ranks follow; it depends on the arguments only.

    Shards are numbered by hops, and ranks by their distance along the axis of the transfer.
    """
    search = _Search(mesh_shape, backward, overlap_ratios)
    while search.todo or search.results:
        search.step()
    return tuple(search.steps)


class _Search:
    """The state of the greedy search.

    Attributes:
        arrived: number of shards that this rank holds along each axis, its own included.
        results: partial results that are still to be sent.
        todo: blocks that are still to be computed, in order of preference.
        last_sent: axis of the result that was sent last.
    """

    def __init__(self, mesh_shape: MeshShape, backward: bool, overlap_ratios: OverlapRatios) -> None:
        self.overlap_ratios = overlap_ratios
        self.size: dict[Axis, int] = {"q": mesh_shape[0], "kv": mesh_shape[1]}
        self.arrived: dict[Axis, int] = {"q": 1, "kv": 1}
        self.results: list[_Result] = [("q", hop) for hop in range(1, mesh_shape[0])]
        self.results += [("kv", hop) for hop in range(1, mesh_shape[1])] if backward else []
        self.todo = _blocks(mesh_shape, backward)
        self.last_sent: Axis = "kv"
        self.steps: list[Step] = []

    def step(self) -> None:
        """Append one step: its transfers, and the blocks that are computed meanwhile."""
        transfers = self._input_transfers() or self._result_transfers()
        for t in transfers:
            if t.kind == "result":
                self.results.remove((t.axis, t.send_shard))
                self.last_sent = t.axis
        blocks = self._blocks_during(transfers)
        self.steps.append(Step(tuple(transfers), tuple(blocks)))
        done = set(blocks)
        self.todo = [block for block in self.todo if block not in done]
        for t in transfers:
            if t.kind == "input":
                self.arrived[t.axis] += 1

    def _input_transfers(self) -> list[Transfer]:
        missing: list[Axis] = [axis for axis in self.size if self.arrived[axis] < self.size[axis]]

        def unlocked_per_cost(axis: Axis) -> float:
            """Return the blocks that the next shard of `axis` unlocks over the blocks that hide its transfer."""
            return self.arrived["kv" if axis == "q" else "q"] / max(self.overlap_ratios.of("input", axis), 1e-9)

        missing.sort(key=unlocked_per_cost, reverse=True)
        if self.overlap_ratios.one_link:
            missing = missing[:1]
        return [_one_hop("input", axis, self.arrived[axis] - 1) for axis in missing]

    def _result_transfers(self) -> list[Transfer]:
        complete = [result for result in self._next_results() if not self._unfinished(result)]
        transfers = [_one_hop("result", axis, hop) for axis, hop in complete]
        return transfers[:1] if self.overlap_ratios.one_link else transfers

    def _next_results(self) -> list[_Result]:
        """Return the next result of each axis; the one that waits for fewer blocks first, else alternate the axes."""
        firsts = [min(r for r in self.results if r[0] == axis) for axis in dict(self.results)]
        return sorted(firsts, key=lambda r: (len(self._unfinished(r)), r[0] == self.last_sent))

    def _unfinished(self, result: _Result) -> list[AttentionBlock]:
        axis, hop = result
        return [b for b in self.todo if hop == (b.q_shard if axis == "q" else b.kv_shard)]

    def _blocks_during(self, transfers: list[Transfer]) -> list[AttentionBlock]:
        """Return just enough blocks to hide the transfers, or all that the next result waits for if these are more."""
        if not self.results:
            return self.todo
        # The last block, which no result waits for, is left for the last transfer.
        ready = [b for b in self.todo[:-1] if b.q_shard < self.arrived["q"] and b.kv_shard < self.arrived["kv"]]
        costs = [self.overlap_ratios.of(t.kind, t.axis) for t in transfers]
        enough = max(1, math.ceil(max(costs, default=0) - 1e-9))
        if self.arrived != self.size:
            return ready[:enough]
        awaited = [block for result in self._next_results() for block in self._unfinished(result)]
        order = list(dict.fromkeys(awaited + ready))
        return order[: max(enough, len(self._unfinished(self._next_results()[0])))]


@lru_cache(maxsize=256)
def mesh_ranks(
    ring: Sequence[int], nodes: Sequence[int], mesh_shape: MeshShape, q_bytes: float, kv_bytes: float
) -> tuple[int, ...]:
    """Return the rank at each position of a mesh whose ranks are on several nodes.

    The ranks of a node have consecutive positions in the Q groups or, if a node then sends fewer bytes to other nodes,
    in the KV groups.

    Args:
        ring: the ranks, node by node.
        nodes: the node of each rank.
        mesh_shape: (a, b) with a b ranks.
        q_bytes, kv_bytes: bytes that a rank sends in its Q group and in its KV group.
    """
    a, b = mesh_shape
    q_first, kv_first = tuple(ring), tuple(ring[p % a * b + p // a] for p in range(a * b))

    def most_sent(ranks: Sequence[int]) -> float:
        return max(sent_by_node(ranks, nodes, mesh_shape, q_bytes, kv_bytes).values())

    return min(q_first, kv_first, key=most_sent)


def sent_by_node(
    ranks: Sequence[int], nodes: Sequence[int], mesh_shape: MeshShape, q_bytes: float, kv_bytes: float
) -> dict[int, float]:
    """Return the bytes that each node sends to other nodes in the rings of a mesh; arguments as in `mesh_ranks`."""
    a, size = mesh_shape[0], len(ranks)
    total = dict.fromkeys(nodes, 0.0)
    for position, rank in enumerate(ranks):
        q_next, kv_next = position - position % a + (position + 1) % a, (position + a) % size
        for following, count in ((q_next, q_bytes), (kv_next, kv_bytes)):
            if nodes[ranks[following]] != nodes[rank]:
                total[nodes[rank]] += count
    return total


def _one_hop(kind: TransferKind, axis: Axis, hop: int) -> Transfer:
    """Return the transfer of the shard of this hop, or of the result for it, to the next rank of the axis."""
    return Transfer(kind, axis, hop, 1, hop + 1, -1)


def _blocks(mesh_shape: MeshShape, backward: bool) -> list[AttentionBlock]:
    """Return all blocks in the order of computation while inputs arrive; blocks that no result waits for come last.

    In the backward pass the own block has two parts, because it is all that there is to compute during the first
    transfer and during the last.
    """
    q_hops, kv_hops = ((*range(1, size), 0) for size in mesh_shape)
    blocks = [AttentionBlock(q, kv) for q in q_hops for kv in (kv_hops if backward else range(mesh_shape[1]))]
    if backward:
        blocks.remove(AttentionBlock(0, 0))
        blocks += [AttentionBlock(0, 0, 0, 2), AttentionBlock(0, 0, 1, 2)]
    return blocks
