"""Intervals cut into rectangles, for operators that take whole blocks, causal squares or an additive bias.

Invisible parts are left out, entirely visible parts need no mask, a staircase of step one is a causal square, and only
the rest is masked. Rows are halved until at most a quarter more entries are computed than are visible, so a mask that
hides most of the work saves that work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.masks.intervals import Intervals

MAX_WASTE = 1.25
"""Rows are cut until computed / visible entries are at most this."""


class Rectangle(NamedTuple):
    """Batch items, query rows and keys of one part of a block.

    Kind "full": every row attends to every key. "causal": as many rows as keys and more than one, row i attends to keys
    up to i. "masked": as the intervals say.
    """

    batch: slice
    rows: slice
    keys: slice
    kind: Literal["full", "causal", "masked"] = "full"

    def is_whole(self, rows: int, keys: int) -> bool:
        """Return whether it is a whole block of so many rows and keys."""
        return self[:3] == (slice(None), slice(0, rows), slice(0, keys))


def rectangles_of(intervals: Intervals) -> tuple[Rectangle, ...]:
    """Return the rectangles of a block, which are disjoint and cover all that is visible; made once for all layers."""
    if "rectangles" not in intervals.kept:
        (items, length), every = intervals.low.shape, slice(None)
        rectangles: list[Rectangle] = []
        if intervals.layers:  # the whole is cheaper than the many rectangles of each layer
            rectangles.append(Rectangle(every, slice(0, length), slice(*intervals.span), "masked"))
        elif intervals.is_causal:
            rectangles.append(Rectangle(every, slice(0, length), slice(0, length), "causal" if length > 1 else "full"))
        else:
            for item in range(items):
                batch = slice(item, item + 1) if items > 1 else every
                rectangles.extend(_rectangles_of_rows(batch, intervals.low[item], intervals.high[item]))
        intervals.kept["rectangles"] = tuple(rectangles)
    made: tuple[Rectangle, ...] = intervals.kept["rectangles"]
    return made


def _rectangles_of_rows(batch: slice, low: Tensor, high: Tensor) -> Iterator[Rectangle]:
    """Yield the rectangles of one item, in the order of their rows."""
    empty, step_low, step_high = high <= low, low.diff(), high.diff()
    climbs = (step_low == 0) & (step_high == 1) & ~empty[:-1]
    # Of the step to the next row: 0 if both attend to the same keys, 1 if the next attends to one key more, else 2.
    kind = torch.where((step_low == 0) & (step_high == 0), 0, 2 - climbs.int())
    breaks = kind == 2
    breaks[1:] |= (kind[1:] != kind[:-1]) & (kind[:-1] != 2)
    borders = breaks.nonzero().flatten().add(1).tolist()  # the rows with which another run of such steps begins
    kinds, lows, highs = kind.tolist(), low.tolist(), high.tolist()
    firsts = low.masked_fill(empty, torch.iinfo(low.dtype).max).tolist()
    visible = [0, *accumulate((high - low).tolist())]
    ranges = [(0, len(lows))]
    while ranges:
        top, bottom = ranges.pop()
        while top < bottom and highs[top] == lows[top]:
            top += 1
        while top < bottom and highs[bottom - 1] == lows[bottom - 1]:
            bottom -= 1
        if top == bottom:
            continue
        rows, first, last = slice(top, bottom), bisect_right(borders, top), bisect_left(borders, bottom)
        if first == last and bottom - top > 1 and kinds[top] == 1:
            if lows[top] < highs[top] - 1:
                yield Rectangle(batch, rows, slice(lows[top], highs[top] - 1))
            yield Rectangle(batch, rows, slice(highs[top] - 1, highs[bottom - 1]), "causal")
            continue
        left, right = min(firsts[rows]), max(highs[rows])
        if (bottom - top) * (right - left) <= MAX_WASTE * (visible[bottom] - visible[top]) and last - first != 1:
            inner = slice(max(lows[rows]), min(highs[rows]))  # the keys that all rows attend to
            if inner.start >= inner.stop:
                yield Rectangle(batch, rows, slice(left, right), "masked")
                continue
            yield Rectangle(batch, rows, inner)
            for side in (slice(left, inner.start), slice(inner.stop, right)):
                if side.start < side.stop:
                    yield Rectangle(batch, rows, side, "masked")
            continue
        middle = (top + bottom) // 2
        if first < last:
            place = bisect_left(borders, middle, first, last)
            middle = borders[min(max(place, first), last - 1)]
        ranges += [(middle, bottom), (top, middle)]
