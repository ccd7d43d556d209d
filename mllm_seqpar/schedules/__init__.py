"""Schedules of distributed attention as data, and the bytes that they send. This package does not import torch.

The executor runs these schedules and the planner simulates them. A mesh shape (a, b) with a * b = n ranks says that
each rank computes with a Q shards and b KV shards: (n, 1) is LV-XAttn, (1, n) is Ring Attention, all others are
Mesh-Attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .mesh import MeshShape, OverlapRatios, mesh_schedule
from .ring import direct_schedule, ring_schedule
from .steps import AttentionBlock, Axis, Schedule, Step, Transfer, TransferKind, with_releases

__all__ = [
    "AttentionBlock",
    "Axis",
    "MeshShape",
    "OverlapRatios",
    "Schedule",
    "Step",
    "Transfer",
    "TransferKind",
    "schedule_for",
]


@lru_cache(maxsize=256)
def schedule_for(
    mesh_shape: MeshShape,
    rank: int,
    *,
    backward: bool,
    ranks: Sequence[int] | None = None,
    direct: bool = False,
    overlap_ratios: OverlapRatios | None = None,
) -> Schedule:
    """Return the schedule of `rank` among a * b ranks for a mesh shape (a, b).

    (1, 1) fits any number of ranks: each computes its own block, and nothing is sent. In the forward pass the results
    stay with the Q shard that they belong to, so nothing follows K and V; all other results return to their owner.

    Args:
        mesh_shape: how many Q shards and KV shards a rank computes with.
        ranks: the ranks in the order of the ring, or by position in a mesh; None: 0, 1, 2, ...
        direct: send Q shards point to point, see `direct_schedule`; for (n, 1) only.
        overlap_ratios: what the order of a mesh is optimised for. None: every transfer takes as long as a block.
    """
    q_shards, kv_shards = mesh_shape
    if q_shards == kv_shards == 1:
        return (Step((), (AttentionBlock(rank, rank),)),)
    ranks = range(q_shards * kv_shards) if ranks is None else ranks
    if kv_shards == 1 and direct:
        schedule = direct_schedule(ranks, rank)
    elif kv_shards == 1:
        schedule = ring_schedule(ranks, rank, "q", return_results=True)
    elif q_shards == 1:
        schedule = ring_schedule(ranks, rank, "kv", return_results=backward)
    else:
        ratios = overlap_ratios or OverlapRatios()
        schedule = mesh_schedule(mesh_shape, ranks, rank, backward=backward, overlap_ratios=ratios)
    return with_releases(schedule, rank)
