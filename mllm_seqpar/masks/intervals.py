"""Rectangles of masks in which each row sees one interval of units: frames of a video, or earlier tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device

from .rectangles import MAX_WASTE, Rectangle, Span, batch_spans, masked_rectangles


@dataclass(frozen=True)
class IntervalRule:
    """Row (b, r) sees units ``low[b, r] <= u < high[b, r]`` of `tokens` keys each, except keys that are not `valid`.

    low, high (B, rows) int64 on the CPU, in units of this block; valid (B, keys) bool or None.
    """

    low: Tensor
    high: Tensor
    tokens: int
    valid: Tensor | None = None
    _by_device: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=dict, repr=False)

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        if device not in self._by_device:  # copied once for all rectangles and layers
            low, high = copy_to_device(torch.stack([self.low, self.high]), device)
            valid = None if self.valid is None else copy_to_device(self.valid, device)
            self._by_device[device] = low, high, valid
        low, high, valid = self._by_device[device]
        unit = torch.div(torch.arange(*keys, device=device), self.tokens, rounding_mode="floor")
        index = slice(*batch), slice(*rows)
        visible = (unit >= low[index].unsqueeze(-1)) & (unit < high[index].unsqueeze(-1))
        if valid is not None:
            visible &= valid[slice(*batch), slice(*keys)].unsqueeze(1)
        return visible


class _Run(NamedTuple):
    """Consecutive rows [top, bottom) that all see [low, high), or with `stair` one unit more from row to row."""

    top: int
    bottom: int
    low: int
    high: int  # of the first row
    stair: bool = False


class _Group:
    """Runs that are merged into one rectangle.

    Attributes:
        left, right: the units that any of the rows sees.
        inner_left, inner_right: the units that all of the rows see.
        visible: number of visible (row, unit) entries.
        gap: True if rows between the runs see nothing.
    """

    def __init__(self) -> None:
        self.runs = 0

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
        self.runs += 1
        self.gap |= run.top != self.bottom
        self.bottom = run.bottom
        self.visible += (run.bottom - run.top) * (run.high - run.low)
        self.left, self.inner_left = min(self.left, run.low), max(self.inner_left, run.low)
        self.right, self.inner_right = max(self.right, run.high), min(self.inner_right, run.high)


def interval_rectangles(
    low: Tensor, high: Tensor, units: int, tokens: int, valid: Tensor | None = None, first: int = 0
) -> tuple[Rectangle, ...]:
    """Return the rectangles of a block whose row (b, r) sees units ``low[b, r] <= u < high[b, r]``.

    Args:
        low, high: (B, rows) int64 on the CPU; they may exceed the range 0 to `units` of the block.
        units: number of units in the block, of `tokens` keys each.
        tokens: keys per unit.
        valid: (B, units * tokens) bool, False for keys that no row sees, or None.
        first: number of units before these in a larger block, in which the rectangles are; 0 with `valid`.
    """
    if valid is not None and bool(valid.all()):
        valid = None
    low, high = low.clamp(0, units), high.clamp(0, units)
    if valid is not None and tokens == 1 and units:
        # Keys before the first and after the last valid one are cut off; holes between them are masked.
        index = torch.arange(units)
        any_valid = valid.any(-1)
        begin = torch.where(valid, index, units).amin(-1)
        end = torch.where(valid, index + 1, 0).amax(-1)
        low = torch.maximum(low, torch.where(any_valid, begin, 0).unsqueeze(-1))
        high = torch.minimum(high, torch.where(any_valid, end, 0).unsqueeze(-1))
    empty = high <= low
    low, high = low + first, high + first
    low, high = low.masked_fill(empty, 0), high.masked_fill(empty, 0)
    if not low.numel():
        return ()
    rule = IntervalRule(low, high, tokens, valid)
    rectangles: list[Rectangle] = []
    for span in batch_spans(low, high):
        for rectangle in _rectangles_of_rows(span, low[span[0]], high[span[0]], tokens, rule):
            rectangles.extend(_with_holes(rectangle, valid, rule))
    return tuple(rectangles)


def _with_holes(rectangle: Rectangle, valid: Tensor | None, rule: IntervalRule) -> Iterator[Rectangle]:
    """Yield `rectangle`, masked if some of its keys are invalid; nothing if all are."""
    valid_keys = None if valid is None else valid[slice(*rectangle.batch), slice(*rectangle.keys)]
    if valid_keys is None or bool(valid_keys.all()):
        yield rectangle
    elif bool(valid_keys.any()):
        yield from masked_rectangles(rectangle.batch, rectangle.rows, rectangle.keys, 1, rule)


def _rectangles_of_rows(batch: Span, low: Tensor, high: Tensor, tokens: int, rule: IntervalRule) -> Iterator[Rectangle]:
    group = _Group()
    for run in _runs(low, high, stairs=tokens == 1):
        if run.stair or not group.accepts(run):
            yield from _rectangles_of_group(batch, group, tokens, rule)
            group = _Group()
        if run.stair:
            square, rows = run.high - 1, (run.top, run.bottom)
            if square > run.low:
                yield Rectangle(batch, rows, (run.low, square))
            yield Rectangle(batch, rows, (square, square + run.bottom - run.top), "causal")
        else:
            group.add(run)
    yield from _rectangles_of_group(batch, group, tokens, rule)


def _runs(low: Tensor, high: Tensor, stairs: bool) -> Iterator[_Run]:
    """Yield maximal runs of rows that see the same units, or one unit more each; rows that see nothing are skipped."""
    rows = low.numel()
    step_low, step_high = low.diff(), high.diff()
    same = (step_low == 0) & (step_high == 0)
    climbs = (step_low == 0) & (step_high == 1) & (high[:-1] > low[:-1]) if stairs else torch.zeros_like(same)
    kind = same.int() + 2 * climbs.int()  # of the step from row i to row i + 1: 0 other, 1 same, 2 one unit more
    borders = torch.nonzero(kind.diff()).flatten().add(1).tolist() if kind.numel() else []
    edges = [0, *borders, kind.numel()]
    lows, highs = low.tolist(), high.tolist()
    done = 0  # rows before this one belong to a run already
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        step = int(kind[first]) if first < last else 0
        if step == 0:
            continue
        top, bottom = max(first, done), last + 1
        if step == 2 and bottom - top < 2:
            continue
        yield from _single_rows(done, top, lows, highs)
        if highs[top] > lows[top]:
            yield _Run(top, bottom, lows[top], highs[top], stair=step == 2)
        done = bottom
    yield from _single_rows(done, rows, lows, highs)


def _single_rows(start: int, stop: int, lows: list[int], highs: list[int]) -> Iterator[_Run]:
    for row in range(start, stop):
        if highs[row] > lows[row]:
            yield _Run(row, row + 1, lows[row], highs[row])


def _rectangles_of_group(batch: Span, group: _Group, tokens: int, rule: IntervalRule) -> Iterator[Rectangle]:
    """Yield one full rectangle of what all rows see, and masked ones of what only some rows see on either side."""
    if not group.runs:
        return
    rows = (group.top, group.bottom)
    if group.gap or group.inner_left >= group.inner_right:
        yield from masked_rectangles(batch, rows, (group.left, group.right), tokens, rule)
        return
    yield Rectangle(batch, rows, (group.inner_left * tokens, group.inner_right * tokens))
    if group.left < group.inner_left:
        yield from masked_rectangles(batch, rows, (group.left, group.inner_left), tokens, rule)
    if group.inner_right < group.right:
        yield from masked_rectangles(batch, rows, (group.inner_right, group.right), tokens, rule)
