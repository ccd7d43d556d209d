"""Schedules as data, and what they send: pure arithmetic, no torch. The executor runs them, the planner times them.

A tile (a, b) with a * b = n ranks says how many ranks' rows and columns a rank computes with: (n, 1) is LV-XAttn,
(1, n) is Ring Attention, what lies between is Mesh-Attention.
"""

from __future__ import annotations

from .mesh import OverlapRatios, mesh
from .ring import direct, rotation
from .steps import AttentionBlock, Axis, Move, Schedule, Step, Stream

__all__ = [
    "Axis",
    "Block",
    "Hides",
    "Move",
    "Schedule",
    "Step",
    "Stream",
    "direct",
    "mesh",
    "rotation",
    "schedule_for",
]


def schedule_for(
    tile: tuple[int, int],
    rank: int,
    *,
    backward: bool,
    straight: bool = False,
    overlap_ratios: OverlapRatios | None = None,
) -> Schedule:
    """The schedule of `rank` of a * b ranks for a tile (a, b); for (1, 1), of any number of ranks that send nothing.

    Forward, a column's results stay with the row (nothing travels behind K and V); everything else travels home.

    Args:
        tile: how many ranks' rows and columns a rank computes with.
        rank: whose schedule.
        backward: which pass.
        straight: rows do not go round, see `direct`; for (n, 1) only.
        hides: what a mesh's order of steps is worked out for; None: every transfer takes as long as a block.
    """
    rows, columns = tile
    if rows == columns == 1:
        return (Step((), (AttentionBlock(rank, rank),)),)
    if columns == 1:
        if straight:
            return direct(rows, rank)
        return rotation(rows, rank, "rows", results_travel=True)
    if rows == 1:
        return rotation(columns, rank, "columns", results_travel=backward)
    return mesh(tile, rank, backward=backward, overlap_ratios=overlap_ratios or OverlapRatios())
