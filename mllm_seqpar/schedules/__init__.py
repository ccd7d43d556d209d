"""Schedules as data, and what they send: pure arithmetic, no torch. The executor runs them, the planner times them.

A tile (a, b) with a * b = n ranks says how many ranks' rows and columns a rank computes with: (n, 1) is LV-XAttn,
(1, n) is Ring Attention, what lies between is Mesh-Attention.
"""

from __future__ import annotations

from .rotation import direct, rotation
from .steps import Axis, Block, Move, Schedule, Step, Stream

__all__ = ["Axis", "Block", "Move", "Schedule", "Step", "Stream", "direct", "rotation", "schedule_for"]


def schedule_for(tile: tuple[int, int], rank: int, *, backward: bool, straight: bool = False) -> Schedule:
    """The schedule of `rank` for a tile (a, b): (n, 1) is LV-XAttn, (1, n) is Ring Attention.

    Forward, a column's results stay with the row (nothing travels behind K and V); everything else travels home.
    `straight`: rows do not go round, see `direct`.
    """
    rows, columns = tile
    if columns == 1:
        if straight:
            return direct(rows, rank)
        return rotation(rows, rank, "rows", results_travel=True)
    if rows == 1:
        return rotation(columns, rank, "columns", results_travel=backward)
    raise ValueError(f"tile {tile}: schedules exist for (n, 1), LV-XAttn, and (1, n), Ring Attention")
