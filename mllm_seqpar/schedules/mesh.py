"""Mesh-Attention: a rank computes a x b blocks, of the rows of its Q group and the columns of its KV group.

n = a b ranks. The Q group of rank r are the a ranks from a * (r // a) on, its KV group the b ranks r % a, r % a + a
and so on. Every block (i, j) belongs to exactly one rank: the one in the Q group of i and in the KV group of j. Inside
each group pieces go round a ring, one hop at a time, and results follow home the same way; a rank's own pieces are hop
0, the ones that reach it after h hops are hop h. All ranks do the same thing at the same step, so the order is worked
out once, in hops (`mesh_order`), and then written out for a rank (`mesh`).

The order is a greedy search (Mesh-Attention's idea, section "schedule"): while inputs are missing, the next transfer is
the one that unlocks the most blocks for what it costs; meanwhile just enough blocks are computed to hide it. Then
results leave as they are finished: rows first, so that they can; in the backward pass rows and columns in turn. What
nobody waits for, the own row (backward: the own block), is computed last, under the last transfers.

A piece stays from its arrival until its last block, so at most a - 1 rows and b - 1 columns of other ranks are held at
one time, and as many partial results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from .steps import AttentionBlock, Axis, Move, Schedule, Step, Stream

Tile = tuple[int, int]
Result = tuple[Axis, int]
"""What was computed for the piece of a hop."""


@dataclass(frozen=True, kw_only=True)
class OverlapRatios:
    """How many blocks must be computed while one transfer is under way, to hide it: its time over a block's time.

    Attributes:
        q: what goes ahead with rows (Q; in the backward pass Q, O, dO and the log-sum-exp).
        kv: K and V.
        o: what comes behind rows (O and the log-sum-exp; dQ).
        dkv: dK and dV, in the backward pass.
        one_link: the rows' transfers and the columns' share a link; else one of each goes at the same time.
    """

    q: float = 1.0
    kv: float = 1.0
    o: float = 1.0
    dkv: float = 1.0
    one_link: bool = True

    def of(self, stream: Stream, axis: Axis) -> float:
        """That of one transfer."""
        if stream == "ahead":
            return self.q if axis == "rows" else self.kv
        return self.o if axis == "rows" else self.dkv


@dataclass(frozen=True)
class Transfer:
    """One hop of a stream, in hops: ahead, the piece of this hop arrives; behind, the result of this hop leaves."""

    stream: Stream
    axis: Axis
    hop: int


@dataclass(frozen=True)
class Round:
    """A step in hops: the transfers, and the blocks (of the row and column of these hops) computed meanwhile."""

    transfers: tuple[Transfer, ...]
    blocks: tuple[AttentionBlock, ...]


def mesh(tile: Tile, rank: int, *, backward: bool, overlap_ratios: OverlapRatios) -> Schedule:
    """The schedule of `rank` for a tile (a, b), both above 1."""
    size = {"rows": tile[0], "columns": tile[1]}
    place = {"rows": rank % tile[0], "columns": rank // tile[0]}

    def member(axis: Axis, position: int) -> int:
        position %= size[axis]
        return rank - place["rows"] + position if axis == "rows" else place["rows"] + tile[0] * position

    def piece(axis: Axis, hop: int) -> int:
        return member(axis, place[axis] - hop)

    def move(t: Transfer) -> Move:
        after, before = member(t.axis, place[t.axis] + 1), member(t.axis, place[t.axis] - 1)
        leaves = t.hop - 1 if t.stream == "ahead" else t.hop
        return Move(t.stream, t.axis, piece(t.axis, leaves), after, piece(t.axis, leaves + 1), before)

    return tuple(
        Step(
            tuple(move(t) for t in step.transfers),
            tuple(replace(b, row=piece("rows", b.row), column=piece("columns", b.column)) for b in step.blocks),
        )
        for step in mesh_order(tile, backward, overlap_ratios)
    )


@lru_cache(maxsize=256)
def mesh_order(tile: Tile, backward: bool, overlap_ratios: OverlapRatios) -> tuple[Round, ...]:
    """The order of transfers and blocks, the same for all ranks: a pure function of the tile and of what hides what."""
    search = _Search(tile, backward, overlap_ratios)
    while search.todo or search.results:
        search.step()
    return tuple(search.rounds)


class _Search:
    """The state of the search: what has arrived, what is to be computed, which results have not left yet."""

    def __init__(self, tile: Tile, backward: bool, overlap_ratios: OverlapRatios) -> None:
        self.overlap_ratios = overlap_ratios
        self.size: dict[Axis, int] = {"rows": tile[0], "columns": tile[1]}
        self.here: dict[Axis, int] = {"rows": 1, "columns": 1}  # pieces that have arrived, the own one included
        self.results: list[Result] = [("rows", hop) for hop in range(1, tile[0])]
        self.results += [("columns", hop) for hop in range(1, tile[1])] if backward else []
        self.todo = _blocks(tile, backward)
        self.left: Axis = "columns"  # the axis of the result that left last
        self.rounds: list[Round] = []

    def step(self) -> None:
        """Chooses the transfers of one step and the blocks to be computed meanwhile."""
        transfers = self._inputs() or self._finished()
        for t in transfers:
            if t.stream == "behind":
                self.results.remove((t.axis, t.hop))
                self.left = t.axis
        blocks = self._compute(transfers)
        self.rounds.append(Round(tuple(transfers), tuple(blocks)))
        done = set(blocks)
        self.todo = [block for block in self.todo if block not in done]
        for t in transfers:
            if t.stream == "ahead":
                self.here[t.axis] += 1

    def _inputs(self) -> list[Transfer]:
        missing: list[Axis] = [axis for axis in self.size if self.here[axis] < self.size[axis]]
        missing.sort(key=self._worth, reverse=True)
        if self.overlap_ratios.one_link:
            missing = missing[:1]
        return [Transfer("ahead", axis, self.here[axis]) for axis in missing]

    def _worth(self, axis: Axis) -> float:
        """Blocks that the next piece of `axis` unlocks, for each block that hides its transfer."""
        unlocked = self.here["columns" if axis == "rows" else "rows"]
        return unlocked / max(self.overlap_ratios.of("ahead", axis), 1e-9)

    def _finished(self) -> list[Transfer]:
        ready = [Transfer("behind", axis, hop) for axis, hop in self._next() if not self._unfinished((axis, hop))]
        return ready[:1] if self.overlap_ratios.one_link else ready

    def _next(self) -> list[Result]:
        """The next result of either axis, first the one that waits for fewer blocks, else the other axis in turn."""
        firsts = [min(r for r in self.results if r[0] == axis) for axis in dict(self.results)]
        return sorted(firsts, key=lambda r: (len(self._unfinished(r)), r[0] == self.left))

    def _unfinished(self, result: Result) -> list[AttentionBlock]:
        axis, hop = result
        return [b for b in self.todo if hop == (b.row if axis == "rows" else b.column)]

    def _compute(self, transfers: list[Transfer]) -> list[AttentionBlock]:
        """Just enough to hide the transfers; then what the next result to leave still waits for."""
        if not self.results:
            return self.todo
        # the last one, which no result waits for, is kept for the last transfer
        here = [b for b in self.todo[:-1] if b.row < self.here["rows"] and b.column < self.here["columns"]]
        costs = [self.overlap_ratios.of(t.stream, t.axis) for t in transfers]
        enough = max(1, math.ceil(max(costs, default=0) - 1e-9))
        if self.here != self.size:
            return here[:enough]
        awaited = [block for result in self._next() for block in self._unfinished(result)]
        order = list(dict.fromkeys(awaited + here))
        return order[: max(enough, len(self._unfinished(self._next()[0])))]


def _blocks(tile: Tile, backward: bool) -> list[AttentionBlock]:
    """All blocks, in the order in which they are computed while inputs arrive: what results wait for, own ones last.

    In the backward pass a rank's own block has two parts, since it is all that there is to compute under the first
    transfer and under the last.
    """
    rows, columns = ((*range(1, size), 0) for size in tile)
    blocks = [AttentionBlock(row, column) for row in rows for column in (columns if backward else range(tile[1]))]
    if backward:
        blocks.remove(AttentionBlock(0, 0))
        blocks += [AttentionBlock(0, 0, 0, 2), AttentionBlock(0, 0, 1, 2)]
    return blocks
