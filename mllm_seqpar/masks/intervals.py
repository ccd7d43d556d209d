"""Tiles of masks by which each row sees one interval of units: frames of a video, or earlier tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .tiles import WASTE, Span, Tile, masked_tiles


@dataclass(frozen=True)
class IntervalRule:
    """Row (b, r) sees units ``low[b, r] <= u < high[b, r]`` of `tokens` keys each, of them only keys with `valid`.

    low, high (B, rows) int64 on the CPU, in units of this block; valid (B, keys) bool or None.
    """

    low: Tensor
    high: Tensor
    tokens: int
    valid: Tensor | None = None

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        """The bool mask (batch, rows, keys) of one tile."""
        unit = torch.div(torch.arange(*keys, device=device), self.tokens, rounding_mode="floor")
        low = self.low[slice(*batch), slice(*rows)].to(device, non_blocking=True).unsqueeze(-1)
        high = self.high[slice(*batch), slice(*rows)].to(device, non_blocking=True).unsqueeze(-1)
        seen = (unit >= low) & (unit < high)
        if self.valid is not None:
            seen &= self.valid[slice(*batch), slice(*keys)].to(device).unsqueeze(1)
        return seen


@dataclass
class _Run:
    """Consecutive rows [top, bottom) that all see [low, high), or with `stair` a unit more from row to row."""

    top: int
    bottom: int
    low: int
    high: int  # of the first row
    stair: bool = False


def interval_tiles(low: Tensor, high: Tensor, units: int, tokens: int, valid: Tensor | None = None) -> tuple[Tile, ...]:
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
    tiles: list[Tile] = []
    for span in spans if low.numel() else []:
        for tile in _tiles_of_rows(span, low[span[0]], high[span[0]], tokens, rule):
            tiles.extend(_with_holes(tile, valid, rule))
    return tuple(tiles)


def _with_holes(tile: Tile, valid: Tensor | None, rule: IntervalRule) -> Iterator[Tile]:
    """`tile`, masked where some of its keys are invisible to everybody."""
    if valid is None or bool(valid[slice(*tile.batch), slice(*tile.keys)].all()):
        yield tile
    elif bool(valid[slice(*tile.batch), slice(*tile.keys)].any()):
        yield from masked_tiles(tile.batch, tile.rows, tile.keys, 1, rule)


def _tiles_of_rows(batch: Span, low: Tensor, high: Tensor, tokens: int, rule: IntervalRule) -> Iterator[Tile]:
    group: list[_Run] = []
    for run in _runs(low, high, stairs=tokens == 1):
        if run.stair:
            yield from _tiles_of_group(batch, group, tokens, rule)
            group = []
            square, rows = run.high - 1, (run.top, run.bottom)
            if square > run.low:
                yield Tile(batch, rows, (run.low, square))
            yield Tile(batch, rows, (square, square + run.bottom - run.top), "causal")
        elif group and not _worth_merging([*group, run]):
            yield from _tiles_of_group(batch, group, tokens, rule)
            group = [run]
        else:
            group.append(run)
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


def _worth_merging(runs: list[_Run]) -> bool:
    visible = sum((run.bottom - run.top) * (run.high - run.low) for run in runs)
    width = max(run.high for run in runs) - min(run.low for run in runs)
    return (runs[-1].bottom - runs[0].top) * width <= WASTE * visible


def _tiles_of_group(batch: Span, runs: list[_Run], tokens: int, rule: IntervalRule) -> Iterator[Tile]:
    """What all rows of a group see is one full tile; what only some see, left and right of it, is masked."""
    if not runs:
        return
    rows = (runs[0].top, runs[-1].bottom)
    left, right = min(run.low for run in runs), max(run.high for run in runs)
    gap = any(a.bottom != b.top for a, b in zip(runs[:-1], runs[1:], strict=True))
    inner_left, inner_right = max(run.low for run in runs), min(run.high for run in runs)
    if gap or inner_left >= inner_right:
        yield from masked_tiles(batch, rows, (left, right), tokens, rule)
        return
    yield Tile(batch, rows, (inner_left * tokens, inner_right * tokens))
    if left < inner_left:
        yield from masked_tiles(batch, rows, (left, inner_left), tokens, rule)
    if inner_right < right:
        yield from masked_tiles(batch, rows, (inner_right, right), tokens, rule)
