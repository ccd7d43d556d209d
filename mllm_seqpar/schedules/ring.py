"""The two ends of the family of tiles: rows go round (LV-XAttn), or columns do (Ring Attention).

LV-XAttn (arXiv 2502.02406, section 3.1) rotates rows, Ring Attention (arXiv 2310.01889) rotates columns: one rule with
the roles exchanged, so both directions of both come from `rotation`. Two details go beyond the papers: the block of a
rank's own row and column never leaves home, which makes n - 1 hops of both streams, not n; and that block is computed
in two parts, the first while the first piece comes in, the last while the last result comes home, so that no hop is
left uncovered.

Rows need not go round: in `direct` a rank's rows go to every other rank straight from home and results come straight
back, as many transfers of as many rows. A ring must carry all rows past all ranks; going straight, each rank can be
sent only the rows that see something of it (who sees what is not the schedule's business).
"""

from __future__ import annotations

from .steps import AttentionBlock, Axis, Move, Schedule, Step


def rotation(size: int, rank: int, axis: Axis, *, results_travel: bool) -> Schedule:
    """The schedule of `rank` when the pieces of `axis` go round the ring and the other axis stays at home.

    At step t the rank computes with the piece of rank - t. With `results_travel`, what is computed for a piece follows
    it one step behind and reaches its home after the last block: (O, lse) and dQ for rows, (dK, dV) for columns.
    """
    after, before = (rank + 1) % size, (rank - 1) % size

    def piece(t: int) -> int:
        return (rank - t) % size

    steps = []
    for t, blocks in enumerate(_blocks(size, rank, axis, results_travel)):
        moves = []
        if t < size - 1:
            moves.append(Move("ahead", axis, piece(t), after, piece(t + 1), before))
        if results_travel and t >= 2:  # the result of step t - 1 leaves; that of the piece in hand arrives
            moves.append(Move("behind", axis, piece(t - 1), after, piece(t), before))
        steps.append(Step(tuple(moves), blocks))
    return tuple(steps)


def direct(size: int, rank: int) -> Schedule:
    """The schedule of `rank` when rows go straight from their home to each other rank, and results straight back.

    At step t the rank computes with the rows of rank - t, as in the ring; its own rows leave for rank + t one step
    before, and what rank + t computed for them comes back one step behind.
    """
    steps = []
    for t, blocks in enumerate(_blocks(size, rank, "rows", results_travel=True)):
        moves = []
        if t < size - 1:
            coming = (rank - t - 1) % size
            moves.append(Move("ahead", "rows", rank, (rank + t + 1) % size, coming, coming))
        if t >= 2:
            going = (rank - t + 1) % size
            moves.append(Move("behind", "rows", going, going, rank, (rank + t - 1) % size))
        steps.append(Step(tuple(moves), blocks))
    return tuple(steps)


def _blocks(size: int, rank: int, axis: Axis, results_travel: bool) -> list[tuple[AttentionBlock, ...]]:
    """What `rank` computes at each step: at step t with the piece of rank - t, and its own block in two parts."""

    def block(t: int, part: int = 0, parts: int = 1) -> tuple[AttentionBlock, ...]:
        piece = (rank - t) % size
        row, column = (piece, rank) if axis == "rows" else (rank, piece)
        return (AttentionBlock(row, column, part, parts),)

    if size == 1 or not results_travel:
        return [block(t) for t in range(size)]
    return [block(0, 0, 2), *(block(t) for t in range(1, size)), block(0, 1, 2)]
