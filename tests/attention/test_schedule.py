"""Layer: pure Python. Schedules for 1 to 16 ranks, played through on paper: who holds what, who sends what to whom.

"lv-xattn" and "ring" go round a ring; in "straight" rows go from their home to each rank, and results straight back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from mllm_seqpar.schedules import Block, Move, Schedule, schedule_for

SIZES = range(1, 17)
Piece = tuple[str, int]  # axis, owner
Part = tuple[int, int, Fraction, Fraction]  # row, column, from, to of the rows of the block


@dataclass
class Rank:
    """What one rank has in its hands."""

    rank: int
    schedule: Schedule
    held: set[Piece] = field(default_factory=set)
    came: Counter[Piece] = field(default_factory=Counter)
    results: dict[Piece, list[Part]] = field(default_factory=dict)
    most: int = 0  # pieces of others held or coming in at one time

    def uses_later(self, piece: Piece, step: int) -> bool:
        axis, owner = piece
        for later in self.schedule[step + 1 :]:
            if any((b.row if axis == "rows" else b.column) == owner for b in later.blocks):
                return True
            if any(m.stream == "ahead" and (m.axis, m.send) == piece for m in later.moves):
                return True
        return False


def part_of(block: Block) -> Part:
    return (
        block.row,
        block.column,
        Fraction(block.part, block.parts),
        Fraction(block.part + 1, block.parts),
    )


def steps_of(name: str, size: int, rank: int, backward: bool) -> Schedule:
    tile = (1, size) if name == "ring" else (size, 1)
    return schedule_for(tile, rank, backward=backward, straight=name == "straight")


def play(name: str, size: int, backward: bool) -> list[Rank]:
    """Plays all ranks' schedules step by step; asserts whatever can go wrong on the way."""
    ranks = [Rank(r, steps_of(name, size, r, backward), {("rows", r), ("columns", r)}) for r in range(size)]
    assert len({len(rank.schedule) for rank in ranks}) == 1, "ranks must take as many steps"
    for t in range(len(ranks[0].schedule)):
        wire: defaultdict[tuple[int, int], list[tuple[Move, list[Part]]]] = defaultdict(list)
        for rank in ranks:
            for move in rank.schedule[t].moves:
                if name == "straight":
                    home, away = (move.send, move.recv) if move.stream == "ahead" else (move.recv, move.send)
                    assert home == rank.rank != away and {move.to, move.source} <= set(range(size)) - {home}
                    assert away == (move.source if move.stream == "ahead" else move.to), "from home, and back to it"
                else:
                    ends = (rank.rank + 1) % size, (rank.rank - 1) % size
                    assert (move.to, move.source) == ends, "one hop of the ring"
                piece = (move.axis, move.send)
                if move.stream == "ahead":
                    assert piece in rank.held, f"rank {rank.rank} passes on {piece} at step {t} without having it"
                    wire[rank.rank, move.to].append((move, []))
                else:
                    wire[rank.rank, move.to].append((move, rank.results.pop(piece)))
        for rank in ranks:
            for block in rank.schedule[t].blocks:
                assert ("rows", block.row) in rank.held and ("columns", block.column) in rank.held, (
                    rank.rank,
                    t,
                    block,
                )
                for piece in (("rows", block.row), ("columns", block.column)):
                    rank.results.setdefault(piece, []).append(part_of(block))
        for rank in ranks:
            coming = {(m.axis, m.recv) for m in rank.schedule[t].moves if m.stream == "ahead"}
            rank.most = max(rank.most, len({p for p in rank.held | coming if p[1] != rank.rank}))
            for move in rank.schedule[t].moves:
                sent, parts = wire[move.source, rank.rank].pop(0)
                what = (sent.stream, sent.axis, sent.send)
                assert what == (move.stream, move.axis, move.recv), "messages of a pair must match in order"
                piece = (move.axis, move.recv)
                if move.stream == "ahead":
                    assert piece not in rank.held, f"rank {rank.rank} receives {piece} twice"
                    rank.held.add(piece)
                    rank.came[piece] += 1
                else:
                    assert piece in rank.results, "what arrives is added to this rank's own result"
                    rank.results[piece] += parts
            rank.held -= {p for p in rank.held if p[1] != rank.rank and not rank.uses_later(p, t)}
        assert not any(wire.values()), "every send has its receive at the same step"
    return ranks


CASES = [
    pytest.param(size, name, backward, id=f"{name}-{size}-{'backward' if backward else 'forward'}")
    for size in SIZES
    for name in ("lv-xattn", "straight", "ring")
    for backward in (False, True)
]


@pytest.mark.parametrize("size,name,backward", CASES)
def test_every_block_is_computed_once_and_every_result_comes_home(size: int, name: str, backward: bool) -> None:
    ranks = play(name, size, backward)
    halves = defaultdict(list)
    for rank in ranks:
        for step in rank.schedule:
            for block in step.blocks:
                halves[block.row, block.column].append(part_of(block)[2:])
    assert set(halves) == {(row, column) for row in range(size) for column in range(size)}
    for parts in halves.values():
        ends = [Fraction(0), *(stop for _, stop in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == ends[:-1] and ends[-1] == 1, "parts add up to the whole"
    for rank in ranks:
        of_row = sorted({part[1] for part in rank.results["rows", rank.rank]})
        assert of_row == list(range(size)) and sum(b - a for *_, a, b in rank.results["rows", rank.rank]) == size
        if backward:
            of_column = sorted({part[0] for part in rank.results["columns", rank.rank]})
            assert of_column == list(range(size))
            assert sum(b - a for *_, a, b in rank.results["columns", rank.rank]) == size


@pytest.mark.parametrize("size,name,backward", CASES)
def test_hops_and_buffers(size: int, name: str, backward: bool) -> None:
    ranks = play(name, size, backward)
    moving = "columns" if name == "ring" else "rows"
    for rank in ranks:
        hops = Counter((move.stream, move.axis) for step in rank.schedule for move in step.moves)
        streams = [("ahead", moving)] + ([("behind", moving)] if name != "ring" or backward else [])
        assert hops == ({stream: size - 1 for stream in streams} if size > 1 else {})
        assert set(rank.came.values()) <= {1} and len(rank.came) == size - 1
        assert rank.most <= 2, "two buffers per kind: one computed with and passed on, one coming in"


@pytest.mark.parametrize("size,name,backward", CASES)
def test_every_transfer_has_a_block_to_hide_behind(size: int, name: str, backward: bool) -> None:
    for rank in range(size):
        for step in steps_of(name, size, rank, backward):
            assert step.blocks or not step.moves


@pytest.mark.parametrize("size", SIZES)
def test_straight_each_rank_meets_every_other_once_in_each_direction(size: int) -> None:
    """What makes it possible to send each rank what it needs and no more."""
    for rank in range(size):
        moves = [move for step in steps_of("straight", size, rank, backward=False) for move in step.moves]
        others = [other for other in range(size) if other != rank]
        for stream in ("ahead", "behind"):
            assert sorted(move.to for move in moves if move.stream == stream) == others
            assert sorted(move.source for move in moves if move.stream == stream) == others


@pytest.mark.parametrize("tile", [(2, 2), (3, 2)])
def test_other_tiles_are_refused(tile: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="schedules exist for"):
        schedule_for(tile, 0, backward=False)
