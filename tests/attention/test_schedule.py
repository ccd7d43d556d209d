"""Layer: pure Python. Schedules for 1 to 16 ranks, played through on paper: who holds what, who sends what to whom.

"lv-xattn" and "ring" go round a ring; in "straight" rows go from their home to each rank, and results straight back;
"axb" is the mesh of that tile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from mllm_seqpar.schedules import AttentionBlock, OverlapRatios, Schedule, Transfer, schedule_for
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of

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


def part_of(block: AttentionBlock) -> Part:
    return (
        block.row,
        block.column,
        Fraction(block.part, block.parts),
        Fraction(block.part + 1, block.parts),
    )


def tile_of(name: str, size: int) -> tuple[int, int]:
    if "x" in name and name != "lv-xattn":
        rows, columns = name.split("x")
        return int(rows), int(columns)
    return (1, size) if name == "ring" else (size, 1)


def steps_of(name: str, size: int, rank: int, backward: bool, overlap_ratios: OverlapRatios | None = None) -> Schedule:
    return schedule_for(
        tile_of(name, size), rank, backward=backward, straight=name == "straight", overlap_ratios=overlap_ratios
    )


def group_of(axis: str, tile: tuple[int, int], rank: int) -> list[int]:
    """The ranks whose rows (columns) `rank` computes with, in the order of their ring."""
    a, b = tile
    return [a * (rank // a) + x for x in range(a)] if axis == "rows" else [rank % a + a * x for x in range(b)]


def play(name: str, size: int, backward: bool, overlap_ratios: OverlapRatios | None = None) -> list[Rank]:
    """Plays all ranks' schedules step by step; asserts whatever can go wrong on the way."""
    ranks = [
        Rank(r, steps_of(name, size, r, backward, overlap_ratios), {("rows", r), ("columns", r)}) for r in range(size)
    ]
    assert len({len(rank.schedule) for rank in ranks}) == 1, "ranks must take as many steps"
    for t in range(len(ranks[0].schedule)):
        wire: defaultdict[tuple[int, int], list[tuple[Transfer, list[Part]]]] = defaultdict(list)
        for rank in ranks:
            for move in rank.schedule[t].moves:
                if name == "straight":
                    home, away = (move.send, move.recv) if move.stream == "ahead" else (move.recv, move.send)
                    assert home == rank.rank != away and {move.to, move.source} <= set(range(size)) - {home}
                    assert away == (move.source if move.stream == "ahead" else move.to), "from home, and back to it"
                else:
                    ring = group_of(move.axis, tile_of(name, size), rank.rank)
                    place = ring.index(rank.rank)
                    ends = ring[(place + 1) % len(ring)], ring[place - 1]
                    assert (move.to, move.source) == ends, "one hop of the group's ring"
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


MESHES = {size: [f"{a}x{b}" for a, b in mesh_shapes_of(size) if 1 not in (a, b)] for size in SIZES}
CASES = [
    pytest.param(size, name, backward, id=f"{name}-{size}-{'backward' if backward else 'forward'}")
    for size in SIZES
    for name in ("lv-xattn", "straight", "ring", *MESHES[size])
    for backward in (False, True)
]
HIDES = [
    OverlapRatios(),
    OverlapRatios(q=0.2, kv=0.2, o=0.2, dkv=0.2),  # computation is long
    OverlapRatios(q=0.1, kv=4, o=0.2, dkv=8),  # columns are what costs
    OverlapRatios(q=3, kv=1, o=6, dkv=2),  # rows are
    OverlapRatios(q=0.5, kv=0.7, o=0.9, dkv=1, one_link=False),
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
    if name in MESHES[size]:
        return
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


MESH_CASES = [
    pytest.param(name, size, backward, id=f"{name}-{'backward' if backward else 'forward'}")
    for size in SIZES
    for name in MESHES[size]
    for backward in (False, True)
]


@pytest.mark.parametrize("name,size,backward", MESH_CASES)
@pytest.mark.parametrize("overlap_ratios", HIDES, ids=str)
def test_a_mesh_receives_nothing_twice_and_holds_one_tile(
    name: str, size: int, backward: bool, overlap_ratios: OverlapRatios
) -> None:
    (a, b), ranks = tile_of(name, size), play(name, size, backward, overlap_ratios)
    for rank in ranks:
        hops = Counter((move.stream, move.axis) for step in rank.schedule for move in step.moves)
        expected = {("ahead", "rows"): a - 1, ("ahead", "columns"): b - 1, ("behind", "rows"): a - 1}
        assert hops == expected | ({("behind", "columns"): b - 1} if backward else {})
        assert set(rank.came.values()) == {1}
        rows, columns = (group_of(axis, (a, b), rank.rank) for axis in ("rows", "columns"))
        assert set(rank.came) == ({("rows", r) for r in rows} | {("columns", c) for c in columns}) - rank.held
        computed = Counter((block.row, block.column) for step in rank.schedule for block in step.blocks)
        assert set(computed) == {(row, column) for row in rows for column in columns}
        assert rank.most <= a + b - 2, "of other ranks' pieces, those of one tile"
        assert (
            all(step.blocks for step in rank.schedule)
            or max(overlap_ratios.q, overlap_ratios.kv, overlap_ratios.o, overlap_ratios.dkv) > 1
        )


def test_the_transfer_that_unlocks_most_for_its_cost_goes_first() -> None:
    """A row unlocks a block per column that is here, a column one per row; what is cheap goes first, then in turn."""

    def arrivals(overlap_ratios: OverlapRatios) -> str:
        steps = schedule_for((3, 3), 4, backward=False, overlap_ratios=overlap_ratios)
        return "".join(m.axis[0] for step in steps for m in step.moves if m.stream == "ahead")

    assert arrivals(OverlapRatios(q=0.1, kv=4)) == "rrcc"
    assert arrivals(OverlapRatios(q=4, kv=0.1)) == "ccrr"
    assert arrivals(OverlapRatios(q=1, kv=1)) == "rcrc"
    assert arrivals(OverlapRatios(q=1, kv=1.9)) == "rcrc", (
        "two rows are here: a column at 1.9 is worth more than a row at 1"
    )
    assert arrivals(OverlapRatios(q=1, kv=2.1)) == "rrcc"


def test_transfers_get_just_the_blocks_that_hide_them() -> None:
    steps = schedule_for((4, 4), 5, backward=False, overlap_ratios=OverlapRatios(q=0.3, kv=2, o=1))
    kinds = ["".join(f"{m.stream[0]}{m.axis[0]}" for m in step.moves) for step in steps]
    assert kinds == ["ar", "ar", "ar", "ac", "ac", "ac", "", "br", "br", "br"]
    assert [len(step.blocks) for step in steps] == [1, 1, 1, 1, 2, 2, 1, 1, 3, 3], "one is all there is at the start"
    own_row = [i for i, step in enumerate(steps) for block in step.blocks if block.row == 5]
    assert own_row == [0, 9, 9, 9], "nobody waits for the own row: last, but for the one block to begin with"


def test_in_backward_rows_and_columns_leave_in_turn() -> None:
    steps = schedule_for((4, 4), 5, backward=True, overlap_ratios=OverlapRatios())
    leaving = "".join(m.axis[0] for step in steps for m in step.moves if m.stream == "behind")
    assert leaving == "rcrcrc"


@pytest.mark.parametrize("size", [1, 4, 6])
def test_ranks_that_keep_to_themselves(size: int) -> None:
    for rank in range(size):
        (step,) = schedule_for((1, 1), rank, backward=True)
        assert not step.moves and step.blocks == (AttentionBlock(rank, rank),)
