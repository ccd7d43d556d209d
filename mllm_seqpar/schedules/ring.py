"""Schedules that communicate one axis only: Q shards (LV-XAttn) or KV shards (Ring Attention).

LV-XAttn (arXiv 2502.02406, section 3.1) rotates Q shards, Ring Attention (arXiv 2310.01889) rotates KV shards. Both are
`ring_schedule`, with the axes exchanged. Two details go beyond the papers. The block of a rank's own Q and KV shards
needs no transfer, so inputs and results take n - 1 hops, not n. That block is computed in two parts, the first during
the first input transfer and the last during the last result transfer, so that every hop is overlapped.

`direct_schedule` sends each Q shard from its owner to every other rank, and the results directly back, with as many
transfers as the ring. A ring sends all rows to all ranks. Point to point, a rank can receive only the rows that attend
to any of its keys; `attention.call_spec` selects these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .steps import AttentionBlock, Axis, Schedule, Step, Transfer


def ring_schedule(ranks: Sequence[int], rank: int, axis: Axis, *, return_results: bool) -> Schedule:
    """Return the schedule of `rank` when the shards of `axis` go around the ring `ranks` and the other axis stays.

    At step t the rank computes with the shard of the rank that is t positions before it. With `return_results`, the
    result for a shard follows it one step later and reaches the owner after the last block: (O, lse) and dQ for Q
    shards, (dK, dV) for KV shards.
    """
    before = _before(ranks, rank)
    next_rank, previous_rank = before(-1), before(1)
    steps = []
    for t, blocks in enumerate(_blocks(ranks, rank, axis, return_results)):
        transfers = []
        if t < len(ranks) - 1:
            transfers.append(Transfer("input", axis, before(t), next_rank, before(t + 1), previous_rank))
        if return_results and t >= 2:  # sends the result of step t - 1, receives the result of the shard of this step
            transfers.append(Transfer("result", axis, before(t - 1), next_rank, before(t), previous_rank))
        steps.append(Step(tuple(transfers), blocks))
    return tuple(steps)


def direct_schedule(ranks: Sequence[int], rank: int) -> Schedule:
    """Return the schedule of `rank` when Q shards, and the results for them, are sent point to point.

    At step t the rank computes with the Q shard of the rank that is t positions before it, as in the ring. Its own Q
    shard is sent to the rank t positions after it one step earlier, and the result of that rank comes back one step
    later.
    """
    before = _before(ranks, rank)
    steps = []
    for t, blocks in enumerate(_blocks(ranks, rank, "q", return_results=True)):
        transfers = []
        if t < len(ranks) - 1:
            src = before(t + 1)
            transfers.append(Transfer("input", "q", rank, before(-t - 1), src, src))
        if t >= 2:
            dst = before(t - 1)
            transfers.append(Transfer("result", "q", dst, dst, rank, before(1 - t)))
        steps.append(Step(tuple(transfers), blocks))
    return tuple(steps)


def _before(ranks: Sequence[int], rank: int) -> Callable[[int], int]:
    """Return the function t -> the rank that is t positions before `rank` in the ring."""
    position, size = ranks.index(rank), len(ranks)
    return lambda t: ranks[(position - t) % size]


def _blocks(ranks: Sequence[int], rank: int, axis: Axis, return_results: bool) -> list[tuple[AttentionBlock, ...]]:
    """Return the blocks of each step: the shard of the rank t positions before, and the own block in two parts."""
    before, size = _before(ranks, rank), len(ranks)

    def block(t: int, part: int = 0, parts: int = 1) -> tuple[AttentionBlock, ...]:
        shard = before(t)
        q_shard, kv_shard = (shard, rank) if axis == "q" else (rank, shard)
        return (AttentionBlock(q_shard, kv_shard, part, parts),)

    if not return_results:
        return [block(t) for t in range(size)]
    return [block(0, 0, 2), *(block(t) for t in range(1, size)), block(0, 1, 2)]
