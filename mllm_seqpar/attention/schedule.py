"""Schedules as data: which block a rank computes at which step, and what travels meanwhile. Plain Python, no torch.

One block is attend(Q_i, KV_j): row i is the query shard of rank i, column j the key shard of rank j. A schedule is a
list of steps; a step's moves are posted first as one grouped exchange, then its blocks are computed, then the moves are
waited for. Two kinds of stream: what goes AHEAD of the computation (the inputs of coming blocks) and what comes BEHIND
it (results on their way home, each rank adding its own part to what arrives).

LV-XAttn (arXiv 2502.02406, section 3.1) rotates rows, Ring Attention (arXiv 2310.01889) rotates columns: one rule with
the roles exchanged, so both directions of both come from `rotation`. Two details go beyond the papers: the block of a
rank's own row and column never leaves home, which makes n - 1 hops of both streams, not n; and that block is computed
in two parts, the first while the first piece comes in, the last while the last result comes home, so that no hop is
left uncovered.
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
class Block:
    """attend(Q_row, KV_column), or only the part of its query rows from part/parts to (part + 1)/parts."""

    row: int
    column: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Step:
    """Moves to post, blocks to compute while they are under way, then the wait."""

    moves: tuple[Move, ...]
    blocks: tuple[Block, ...]


Schedule = tuple[Step, ...]


def rotation(size: int, rank: int, axis: Axis, *, results_travel: bool) -> Schedule:
    """The schedule of `rank` when the pieces of `axis` go round the ring and the other axis stays at home.

    At step t the rank computes with the piece of rank - t. With `results_travel`, what is computed for a piece follows
    it one step behind and reaches its home after the last block: (O, lse) and dQ for rows, (dK, dV) for columns.
    """
    after, before = (rank + 1) % size, (rank - 1) % size

    def piece(t: int) -> int:
        return (rank - t) % size

    def block(t: int, part: int = 0, parts: int = 1) -> Block:
        row, column = (piece(t), rank) if axis == "rows" else (rank, piece(t))
        return Block(row, column, part, parts)

    if size == 1:
        return (Step((), (block(0),)),)
    steps = []
    for t in range(size + 1 if results_travel else size):
        moves = []
        if t < size - 1:
            moves.append(Move("ahead", axis, piece(t), after, piece(t + 1), before))
        if results_travel and t >= 2:  # the result of step t - 1 leaves; that of the piece in hand arrives
            moves.append(Move("behind", axis, piece(t - 1), after, piece(t), before))
        if not results_travel:
            blocks = (block(t),)
        elif t in (0, size):
            blocks = (block(0, part=0 if t == 0 else 1, parts=2),)
        else:
            blocks = (block(t),)
        steps.append(Step(tuple(moves), blocks))
    return tuple(steps)


def schedule_for(tile: tuple[int, int], rank: int, *, backward: bool) -> Schedule:
    """The schedule of `rank` for a tile (a, b): (n, 1) is LV-XAttn, (1, n) is Ring Attention.

    Forward, a column's results stay with the row (nothing travels behind K and V); everything else travels home.
    """
    rows, columns = tile
    if columns == 1:
        return rotation(rows, rank, "rows", results_travel=True)
    if rows == 1:
        return rotation(columns, rank, "columns", results_travel=backward)
    raise ValueError(f"tile {tile}: schedules exist for (n, 1), LV-XAttn, and (1, n), Ring Attention")
