"""Tiles of masks by which each row sees one interval of units: frames of a video, or earlier tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .rectangles import WASTE, Rectangle, Span, masked_rectangles


@dataclass(frozen=True)
class IntervalRule:
    """Row (b, r) sees units ``low[b, r] <= u < high[b, r]`` of `tokens` keys each, of them only keys with `valid`.

    low, high (B, rows) int64 on the CPU, in units of this block; valid (B, keys) bool or None.
    """

    low: Tensor
    high: Tensor
    tokens: int
    valid: Tensor | None = None
    _on: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=dict, repr=False)

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        """The bool mask (batch, rows, keys) of one tile."""
        if device not in self._on:  # moved once, for all tiles and layers: each copy would hold the host up
            valid = None if self.valid is None else self.valid.to(device)
            self._on[device] = self.low.to(device), self.high.to(device), valid
        low, high, valid = self._on[device]
        unit = torch.div(torch.arange(*keys, device=device), self.tokens, rounding_mode="floor")
        of = slice(*batch), slice(*rows)
        seen = (unit >= low[of].unsqueeze(-1)) & (unit < high[of].unsqueeze(-1))
        if valid is not None:
            seen &= valid[slice(*batch), slice(*keys)].unsqueeze(1)
        return seen


class _Run(NamedTuple):
    """Consecutive rows [top, bottom) that all see [low, high), or with `stair` a unit more from row to row."""

    top: int
    bottom: int
    low: int
    high: int  # of the first row
    stair: bool = False


class _Group:
    """Runs that become one rectangle: what all of them see, what any of them sees, and how much that is."""

    def __init__(self) -> None:
        self.runs = 0

    def accepts(self, run: _Run) -> bool:
        """Whether the rectangle around the group and `run` costs little more than what is visible in it."""
        if not self.runs:
            return True
        area = (run.bottom - self.top) * (max(self.right, run.high) - min(self.left, run.low))
        return area <= WASTE * (self.visible + (run.bottom - run.top) * (run.high - run.low))

    def add(self, run: _Run) -> None:
        if not self.runs:
            self.top, self.bottom, self.visible, self.gap = run.top, run.top, 0, False
            self.left, self.right, self.inner_left, self.inner_right = run.low, run.high, run.low, run.high
        self.runs += 1
        self.gap |= run.top != self.bottom  # rows between that see nothing
        self.bottom = run.bottom
        self.visible += (run.bottom - run.top) * (run.high - run.low)
        self.left, self.inner_left = min(self.left, run.low), max(self.inner_left, run.low)
        self.right, self.inner_right = max(self.right, run.high), min(self.inner_right, run.high)


def interval_rectangles(
    low: Tensor, high: Tensor, units: int, tokens: int, valid: Tensor | None = None
) -> tuple[Rectangle, ...]:
    """The tiles of a block whose row (b, r) sees units ``low[b, r] <= u < high[b, r]``.

    Args:
        low, high: (B, rows) int64 on the CPU; may reach beyond the block's units 0 .. units.
        units: how many units the block has, `tokens` keys each.
        valid: (B, units * tokens) bool, keys that any row may see at all, or None for all.
    """
    if valid is not None and bool(valid.all()):
        valid = None
    low, high = low.clamp(0, units), high.clamp(0, units)
    if valid is not None and tokens == 1 and units:
        # keys before the first and after the last valid one are cut off; holes between them are masked
        index = torch.arange(units)
        some = valid.any(-1)
        first = torch.where(valid, index, units).amin(-1)
        last = torch.where(valid, index + 1, 0).amax(-1)
        low = torch.maximum(low, torch.where(some, first, 0).unsqueeze(-1))
        high = torch.minimum(high, torch.where(some, last, 0).unsqueeze(-1))
    empty = high <= low
    low, high = low.masked_fill(empty, 0), high.masked_fill(empty, 0)
    rule = IntervalRule(low, high, tokens, valid)
    batch = low.shape[0]
    alike = all(torch.equal(low[0], low[b]) and torch.equal(high[0], high[b]) for b in range(1, batch))
    spans = [(0, batch)] if alike else [(b, b + 1) for b in range(batch)]
    tiles: list[Rectangle] = []
    for span in spans if low.numel() else []:
        for tile in _tiles_of_rows(span, low[span[0]], high[span[0]], tokens, rule):
            tiles.extend(_with_holes(tile, valid, rule))
    return tuple(tiles)


def _with_holes(tile: Rectangle, valid: Tensor | None, rule: IntervalRule) -> Iterator[Rectangle]:
    """`tile`, masked where some of its keys are invisible to everybody."""
    if valid is None or bool(valid[slice(*tile.batch), slice(*tile.keys)].all()):
        yield tile
    elif bool(valid[slice(*tile.batch), slice(*tile.keys)].any()):
        yield from masked_rectangles(tile.batch, tile.rows, tile.keys, 1, rule)


def _tiles_of_rows(batch: Span, low: Tensor, high: Tensor, tokens: int, rule: IntervalRule) -> Iterator[Rectangle]:
    group = _Group()
    for run in _runs(low, high, stairs=tokens == 1):
        if run.stair or not group.accepts(run):
            yield from _tiles_of_group(batch, group, tokens, rule)
            group = _Group()
        if run.stair:
            square, rows = run.high - 1, (run.top, run.bottom)
            if square > run.low:
                yield Rectangle(batch, rows, (run.low, square))
            yield Rectangle(batch, rows, (square, square + run.bottom - run.top), "causal")
        else:
            group.add(run)
    yield from _tiles_of_group(batch, group, tokens, rule)


def _runs(low: Tensor, high: Tensor, stairs: bool) -> Iterator[_Run]:
    """Maximal runs of rows that see the same units, or one unit more each; rows that see nothing are left out."""
    rows = low.numel()
    if rows == 0:
        return
    step_low, step_high = low.diff(), high.diff()
    same = (step_low == 0) & (step_high == 0)
    climbs = (step_low == 0) & (step_high == 1) & (high[:-1] > low[:-1]) if stairs else torch.zeros_like(same)
    kind = same.int() + 2 * climbs.int()  # of the step from row i to row i + 1: 0 other, 1 same, 2 one more
    borders = torch.nonzero(kind.diff()).flatten().add(1).tolist() if kind.numel() else []
    edges = [0, *borders, kind.numel()]
    lows, highs = low.tolist(), high.tolist()
    done = 0  # rows below are in a run already
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        which = int(kind[first]) if first < last else 0
        if which == 0:
            continue
        top, bottom = max(first, done), last + 1
        if which == 2 and bottom - top < 2:
            continue
        yield from _single_rows(done, top, lows, highs)
        if highs[top] > lows[top]:
            yield _Run(top, bottom, lows[top], highs[top], stair=which == 2)
        done = bottom
    yield from _single_rows(done, rows, lows, highs)


def _single_rows(start: int, stop: int, lows: list[int], highs: list[int]) -> Iterator[_Run]:
    for row in range(start, stop):
        if highs[row] > lows[row]:
            yield _Run(row, row + 1, lows[row], highs[row])


def _tiles_of_group(batch: Span, group: _Group, tokens: int, rule: IntervalRule) -> Iterator[Rectangle]:
    """What all rows of a group see is one full tile; what only some see, left and right of it, is masked."""
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
