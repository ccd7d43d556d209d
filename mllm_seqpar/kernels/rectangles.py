"""Intervals cut into rectangles, for operators that take whole blocks, causal squares or an additive bias.

Invisible parts are left out, entirely visible parts need no mask, a staircase of step one is a causal square, and only
the rest is masked. Rows are merged into one rectangle only while at most a quarter more entries are computed than are
visible, so a mask that hides most of the work saves that work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.masks.intervals import Intervals

MAX_WASTE = 1.25
"""Rows are merged into one rectangle while computed / visible entries stays below this."""


class Rectangle(NamedTuple):
    """Batch items, query rows and keys of one part of a block.

    Kind "full": every row attends to every key. "causal": as many rows as keys, row i attends to keys up to i.
    "masked": as the intervals say.
    """

    batch: slice
    rows: slice
    keys: slice
    kind: Literal["full", "causal", "masked"] = "full"


def rectangles_of(intervals: Intervals) -> tuple[Rectangle, ...]:
    """Return the rectangles of a block, which are disjoint and cover all that is visible; made once for all layers."""
    if "rectangles" not in intervals.kept:
        items = intervals.low.shape[0]
        found: list[Rectangle] = []
        for item in range(items):
            batch = slice(item, item + 1) if items > 1 else slice(None)
            found.extend(_rectangles_of_rows(batch, intervals.low[item], intervals.high[item]))
        intervals.kept["rectangles"] = tuple(found)
    rectangles: tuple[Rectangle, ...] = intervals.kept["rectangles"]
    return rectangles


class _Run(NamedTuple):
    """Consecutive rows [top, bottom) that all attend to [low, high), or with `stair` one key more from row to row."""

    top: int
    bottom: int
    low: int
    high: int  # of the first row
    stair: bool = False


class _Group:
    """Runs that are merged into one rectangle.

    Attributes:
        runs: the runs, in order.
        left, right: the keys that any of the rows attends to.
        inner_left, inner_right: the keys that all of the rows attend to.
        visible: number of visible entries.
        gap: True if rows between the runs attend to nothing.
    """

    def __init__(self) -> None:
        self.runs: list[_Run] = []

    def accepts(self, run: _Run) -> bool:
        """Return whether the rectangle around the group and `run` stays within `MAX_WASTE`."""
        if not self.runs:
            return True
        area = (run.bottom - self.top) * (max(self.right, run.high) - min(self.left, run.low))
        return area <= MAX_WASTE * (self.visible + (run.bottom - run.top) * (run.high - run.low))

    def add(self, run: _Run) -> None:
        if not self.runs:
            self.top, self.bottom, self.visible, self.gap = run.top, run.top, 0, False
            self.left, self.right, self.inner_left, self.inner_right = run.low, run.high, run.low, run.high
        self.runs.append(run)
        self.gap |= run.top != self.bottom
        self.bottom = run.bottom
        self.visible += (run.bottom - run.top) * (run.high - run.low)
        self.left, self.inner_left = min(self.left, run.low), max(self.inner_left, run.low)
        self.right, self.inner_right = max(self.right, run.high), min(self.inner_right, run.high)

    def rectangles(self, batch: slice) -> Iterator[Rectangle]:
        """Yield a full rectangle of the keys that all rows attend to, and masked ones of the keys on either side.

        Of two runs, each is a full rectangle: as many, without a mask and without partial results to merge.
        """
        if len(self.runs) <= 2:
            for run in self.runs:
                yield Rectangle(batch, slice(run.top, run.bottom), slice(run.low, run.high))
            return
        rows = slice(self.top, self.bottom)
        if self.gap or self.inner_left >= self.inner_right:
            yield Rectangle(batch, rows, slice(self.left, self.right), "masked")
            return
        yield Rectangle(batch, rows, slice(self.inner_left, self.inner_right))
        for left, right in ((self.left, self.inner_left), (self.inner_right, self.right)):
            if left < right:
                yield Rectangle(batch, rows, slice(left, right), "masked")


def _rectangles_of_rows(batch: slice, low: Tensor, high: Tensor) -> Iterator[Rectangle]:
    group = _Group()
    for run in _runs(low, high):
        if run.stair or not group.accepts(run):
            yield from group.rectangles(batch)
            group = _Group()
        if run.stair:
            square, rows = run.high - 1, slice(run.top, run.bottom)
            if square > run.low:
                yield Rectangle(batch, rows, slice(run.low, square))
            yield Rectangle(batch, rows, slice(square, square + run.bottom - run.top), "causal")
        else:
            group.add(run)
    yield from group.rectangles(batch)


def _runs(low: Tensor, high: Tensor) -> Iterator[_Run]:
    """Yield maximal runs of rows that attend to the same keys, or one key more each; rows that attend to nothing are
    skipped."""
    rows = low.numel()
    step_low, step_high = low.diff(), high.diff()
    same = (step_low == 0) & (step_high == 0)
    climbs = (step_low == 0) & (step_high == 1) & (high[:-1] > low[:-1])
    kind = same.int() + 2 * climbs.int()  # of the step from row i to row i + 1: 0 other, 1 same, 2 one key more
    borders = torch.nonzero(kind.diff()).flatten().add(1).tolist() if kind.numel() else []
    edges = [0, *borders, kind.numel()]
    kinds, lows, highs = kind.tolist(), low.tolist(), high.tolist()
    done = 0  # rows before this one belong to a run already
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        step = kinds[first] if first < last else 0
        if step == 0:
            continue
        top, bottom = max(first, done), last + 1
        if step == 2 and bottom - top < 2:
            continue
        if done < top:
            yield from _single_rows(done, top, lows, highs)
        if highs[top] > lows[top]:
            yield _Run(top, bottom, lows[top], highs[top], stair=step == 2)
        done = bottom
    if done < rows:
        yield from _single_rows(done, rows, lows, highs)


def _single_rows(start: int, stop: int, lows: list[int], highs: list[int]) -> Iterator[_Run]:
    for row in range(start, stop):
        if highs[row] > lows[row]:
            yield _Run(row, row + 1, lows[row], highs[row])
