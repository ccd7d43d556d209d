"""Schedules as data: which block a rank computes at which step, and what travels meanwhile. Plain Python, no torch.

One block is attend(Q_i, KV_j): row i is the query shard of rank i, column j the key shard of rank j. A schedule is a
list of steps; a step's moves are posted first as one grouped exchange, then its blocks are computed, then the moves are
waited for. Two kinds of stream: what goes AHEAD of the computation (the inputs of coming blocks) and what comes BEHIND
it (results on their way home, each rank adding its own part to what arrives).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stream = Literal["ahead", "behind"]
Axis = Literal["rows", "columns"]


@dataclass(frozen=True)
class Move:
    """One hop of one stream: the piece of home rank `send` leaves for rank `to`; that of `recv` comes from `source`."""

    stream: Stream
    axis: Axis
    send: int
    to: int
    recv: int
    source: int


@dataclass(frozen=True)
class AttentionBlock:
    """attend(Q_row, KV_column), or only the part of its query rows from part/parts to (part + 1)/parts."""

    row: int
    column: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Step:
    """Moves to post, blocks to compute while they are under way, then the wait."""

    moves: tuple[Move, ...]
    blocks: tuple[AttentionBlock, ...]


Schedule = tuple[Step, ...]
