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

from .steps import AttentionBlock, Axis, Schedule, Step, Transfer


def ring_schedule(size: int, rank: int, axis: Axis, *, return_results: bool) -> Schedule:
    """Return the schedule of `rank` when the shards of `axis` go around the ring and the other axis stays.

    At step t the rank computes with the shard of rank - t. With `return_results`, the result for a shard follows it
    one step later and reaches the owner after the last block: (O, lse) and dQ for Q shards, (dK, dV) for KV shards.
    """
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size

    def shard(t: int) -> int:
        return (rank - t) % size

    steps = []
    for t, blocks in enumerate(_blocks(size, rank, axis, return_results)):
        transfers = []
        if t < size - 1:
            transfers.append(Transfer("input", axis, shard(t), next_rank, shard(t + 1), previous_rank))
        if return_results and t >= 2:  # sends the result of step t - 1, receives that of the shard of this step
            transfers.append(Transfer("result", axis, shard(t - 1), next_rank, shard(t), previous_rank))
        steps.append(Step(tuple(transfers), blocks))
    return tuple(steps)


def direct_schedule(size: int, rank: int) -> Schedule:
    """Return the schedule of `rank` when Q shards, and the results for them, travel point to point.

    At step t the rank computes with the Q shard of rank - t, as in the ring. Its own Q shard is sent to rank + t one
    step earlier, and the result that rank + t computed comes back one step later.
    """
    steps = []
    for t, blocks in enumerate(_blocks(size, rank, "q", return_results=True)):
        transfers = []
        if t < size - 1:
            src = (rank - t - 1) % size
            transfers.append(Transfer("input", "q", rank, (rank + t + 1) % size, src, src))
        if t >= 2:
            dst = (rank - t + 1) % size
            transfers.append(Transfer("result", "q", dst, dst, rank, (rank + t - 1) % size))
        steps.append(Step(tuple(transfers), blocks))
    return tuple(steps)


def _blocks(size: int, rank: int, axis: Axis, return_results: bool) -> list[tuple[AttentionBlock, ...]]:
    """Return the blocks of each step: at step t the shard of rank - t, and the rank's own block in two parts."""

    def block(t: int, part: int = 0, parts: int = 1) -> tuple[AttentionBlock, ...]:
        shard = (rank - t) % size
        q_shard, kv_shard = (shard, rank) if axis == "q" else (rank, shard)
        return (AttentionBlock(q_shard, kv_shard, part, parts),)

    if not return_results:
        return [block(t) for t in range(size)]
    return [block(0, 0, 2), *(block(t) for t in range(1, size)), block(0, 1, 2)]
