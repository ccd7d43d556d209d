"""Mask rectangles: how the mask of an attention block is cut into parts that a block kernel computes.

The mask of a block (rows of one rank, keys of another) is never expanded as a whole. Invisible parts are left out,
entirely visible parts need no mask, a staircase of step one is a causal square, and only the rest is expanded, one
rectangle of at most `MAX_MASK` entries at a time. Rows are merged into one rectangle only while at most a quarter more
entries are computed than are visible, so a mask that hides most of the work saves that work.

If the visible units are scattered, with more gaps than rectangles are worth, their keys are gathered and computed as
one rectangle without the gaps (`KeySelection`).

Coordinates are local to the block. Masks count in units (frames, or single tokens) of `tokens` keys each.

`interval_rectangles` cuts masks in which each row attends to one interval of units: frames of a video, or earlier
tokens of a text. `dense_rectangles` cuts tables (row, frame), which may have holes. The visible frames of a row are
one Python integer there with a bit per frame, which makes unions and counts over thousands of frames single operations
at machine speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device

MAX_MASK = 1 << 22
"""Entries of one expanded mask: 4 MiB as bool, 16 MiB as a float32 bias."""

MAX_WASTE = 1.25
"""Rows are merged into one rectangle while computed / visible entries stays below this."""

MAX_SEGMENTS = 16
"""One group of rows is cut into at most this many rectangles. If there are more, the keys that it attends to are
gathered instead."""

MAX_GATHERED = 1 << 16
"""Keys that are gathered at a time: 128 MiB of K and V with 4 heads of 128 in 2 bytes."""

Span = tuple[int, int]
"""A half-open range (start, stop)."""


class MaskRule(Protocol):
    """Defines which keys of a block are visible to which rows."""

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        """Return the bool mask (batch, rows, keys) of one rectangle, True where visible."""


@dataclass(frozen=True)
class KeySelection:
    """Selected units of a block, of `tokens` keys each, numbered without the gaps; units (u,) int64 on the CPU."""

    units: Tensor
    tokens: int
    _by_device: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def keys(self, span: Span, device: torch.device) -> Tensor:
        """Return the positions in the block, ascending (T,) int64, of a span of the selected keys."""
        first, last = span[0] // self.tokens, -(-span[1] // self.tokens)
        starts = self.units_on(device)[first:last] * self.tokens
        keys = (starts.unsqueeze(-1) + torch.arange(self.tokens, device=device)).flatten()
        return keys[span[0] - first * self.tokens :][: span[1] - span[0]]

    def units_on(self, device: torch.device) -> Tensor:
        """Return `units` on `device`, copied once for all rectangles and layers."""
        if device not in self._by_device:
            self._by_device[device] = copy_to_device(self.units, device)
        return self._by_device[device]


@dataclass(frozen=True)
class Rectangle:
    """Batch items, query rows and keys of one part of a block, and which of its entries are visible.

    Kind "full": every row attends to every key. "causal": as many rows as keys, row i attends to keys up to i.
    "masked": as `rule` says. With `gathered`, `keys` is a span of the selected keys.
    """

    batch: Span
    rows: Span
    keys: Span
    kind: Literal["full", "causal", "masked"] = "full"
    rule: MaskRule | None = None
    gathered: KeySelection | None = None

    @property
    def entries(self) -> int:
        """Score entries that are computed per head."""
        batch, rows, keys = (stop - start for start, stop in (self.batch, self.rows, self.keys))
        return batch * (rows * (rows + 1) // 2 if self.kind == "causal" else rows * keys)

    def key_index(self, device: torch.device) -> slice | Tensor:
        """Return what selects the keys of this rectangle from the keys of the block."""
        return slice(*self.keys) if self.gathered is None else self.gathered.keys(self.keys, device)

    def mask(self, device: torch.device) -> Tensor | None:
        """Return the expanded mask of kind "masked", else None."""
        return self.rule.expand(self.batch, self.rows, self.keys, device) if self.rule is not None else None


def clip_rows(rectangle: Rectangle, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the part of `rectangle` with start <= row < stop, as at most two rectangles."""
    first, last = max(rectangle.rows[0], start), min(rectangle.rows[1], stop)
    if first >= last:
        return
    if rectangle.kind != "causal":
        yield replace(rectangle, rows=(first, last))
        return
    above = first - rectangle.rows[0]  # rows that are cut off at the top; all remaining rows attend to their keys
    key = rectangle.keys[0]
    if above:
        yield replace(rectangle, rows=(first, last), keys=(key, key + above), kind="full")
    yield replace(rectangle, rows=(first, last), keys=(key + above, key + last - rectangle.rows[0]))


def full_rectangle(batch: int, rows: int, keys: int) -> tuple[Rectangle, ...]:
    """Return the rectangles of a block without a mask."""
    return (Rectangle((0, batch), (0, rows), (0, keys)),) if batch and rows and keys else ()


def masked_rectangles(batch: Span, rows: Span, units: Span, tokens: int, rule: MaskRule) -> Iterator[Rectangle]:
    """Yield masked rectangles that cover the given ranges, none with more than `MAX_MASK` entries."""
    items = batch[1] - batch[0]
    if items > MAX_MASK // 256:
        for first in range(*batch, MAX_MASK // 256):
            yield from masked_rectangles((first, min(first + MAX_MASK // 256, batch[1])), rows, units, tokens, rule)
        return
    height = max(1, min(rows[1] - rows[0], MAX_MASK // (256 * items)))
    for top in range(rows[0], rows[1], height):
        bottom = min(top + height, rows[1])
        keys = (units[0] * tokens, units[1] * tokens)
        width = max(1, MAX_MASK // (items * (bottom - top)))
        for left in range(keys[0], keys[1], width):
            yield Rectangle(batch, (top, bottom), (left, min(left + width, keys[1])), "masked", rule)


def batch_spans(*tables: Tensor) -> list[Span]:
    """Return one span over the batch if each table (B, ...) is equal for all its items, else one span per item."""
    batch = tables[0].shape[0]
    equal = all(torch.equal(table[0], table[b]) for b in range(1, batch) for table in tables)
    return [(0, batch)] if equal else [(b, b + 1) for b in range(batch)]


@dataclass(frozen=True)
class IntervalRule:
    """Row (b, r) attends to units ``low[b, r] <= u < high[b, r]`` of `tokens` keys each, except keys that are not
    `valid`.

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
    """Consecutive rows [top, bottom) that all attend to [low, high), or with `stair` one unit more from row to row."""

    top: int
    bottom: int
    low: int
    high: int  # of the first row
    stair: bool = False


class _Group:
    """Runs that are merged into one rectangle.

    Attributes:
        runs: the runs, in order.
        left, right: the units that any of the rows attends to.
        inner_left, inner_right: the units that all of the rows attend to.
        visible: number of visible (row, unit) entries.
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


def interval_rectangles(
    low: Tensor, high: Tensor, units: int, tokens: int, valid: Tensor | None = None, first: int = 0
) -> tuple[Rectangle, ...]:
    """Return the rectangles of a block whose row (b, r) attends to units ``low[b, r] <= u < high[b, r]``.

    Args:
        low, high: (B, rows) int64 on the CPU; they may exceed the range 0 to `units` of the block.
        units: number of units in the block, of `tokens` keys each.
        tokens: keys per unit.
        valid: (B, units * tokens) bool, False for keys that no row attends to, or None.
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
        found = _rectangles_of_rows(span, low[span[0]], high[span[0]], tokens, rule)
        rectangles.extend(found if valid is None else _with_holes(found, valid, rule))
    return tuple(rectangles)


def _with_holes(rectangles: Iterable[Rectangle], valid: Tensor, rule: IntervalRule) -> Iterator[Rectangle]:
    """Yield the rectangles that have valid keys; they are masked if some of their keys are invalid."""
    for rectangle in rectangles:
        valid_keys = valid[slice(*rectangle.batch), slice(*rectangle.keys)]
        if bool(valid_keys.all()):
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
    """Yield maximal runs of rows that attend to the same units, or one unit more each; rows that attend to nothing are
    skipped."""
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


def _rectangles_of_group(batch: Span, group: _Group, tokens: int, rule: IntervalRule) -> Iterator[Rectangle]:
    """Yield a full rectangle of the units that all rows attend to, and masked ones of the units on either side.

    Of two runs, each is a full rectangle: as many rectangles, without a mask and without partial results to merge.
    """
    if len(group.runs) <= 2:
        for run in group.runs:
            yield Rectangle(batch, (run.top, run.bottom), (run.low * tokens, run.high * tokens))
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


@dataclass(frozen=True)
class DenseRule:
    """Row (b, r) attends to the keys of unit u if ``visible[b, r, u]``; visible (B or 1, rows, units) bool.

    With `gathered`, only the units that it selects count, numbered without the gaps.
    """

    visible: Tensor
    tokens: int
    gathered: KeySelection | None = None
    _by_device: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        first, last = keys[0] // self.tokens, -(-keys[1] // self.tokens)
        if device not in self._by_device:  # copied once for all rectangles and layers
            self._by_device[device] = copy_to_device(self.visible, device)
        visible = self._by_device[device]
        visible = visible[:, slice(*rows)] if visible.shape[0] == 1 else visible[slice(*batch), slice(*rows)]
        if self.gathered is None:
            visible = visible[..., first:last]
        else:
            visible = visible.index_select(-1, self.gathered.units_on(device)[first:last])
        start = keys[0] - first * self.tokens
        expanded = visible if self.tokens == 1 else visible.repeat_interleave(self.tokens, dim=-1)
        return expanded[..., start : start + keys[1] - keys[0]]


def dense_rectangles(visible: Tensor, tokens: int) -> tuple[Rectangle, ...]:
    """Return the rectangles of a block whose row (b, r) attends to frame f if visible[b, r, f].

    Args:
        visible: (B, rows, frames) bool on the CPU.
        tokens: keys per frame.
    """
    if not visible.numel():
        return ()
    rule = DenseRule(visible, tokens)
    return tuple(r for span in batch_spans(visible) for r in _rectangles_of_table(span, visible[span[0]], rule))


def _rectangles_of_table(batch: Span, visible: Tensor, rule: DenseRule) -> Iterator[Rectangle]:
    """Merge consecutive rows into groups while `MAX_WASTE` allows it, and yield the rectangles of each group."""
    top, total, union, common = 0, 0, 0, -1  # of the current group, whose rows start at `top`
    for row, frames in enumerate(map(_as_bits, visible)):
        count = frames.bit_count()
        if row > top and (row + 1 - top) * (union | frames).bit_count() > MAX_WASTE * (total + count):
            yield from _rectangles_of_union(batch, (top, row), union, common, rule)
            top, total, union, common = row, 0, 0, -1
        total, union, common = total + count, union | frames, common & frames
    yield from _rectangles_of_union(batch, (top, visible.shape[0]), union, common, rule)


def _as_bits(row: Tensor) -> int:
    """Return the frames (frames,) bool as an integer. Frame f is bit 8 f, so the bytes of the tensor are the number."""
    return int.from_bytes(row.contiguous().view(torch.uint8).numpy().tobytes(), "little")


def _as_table(bits: int, frames: int) -> Tensor:
    """Return the inverse of `_as_bits`, (frames,) uint8."""
    return torch.frombuffer(bytearray(bits.to_bytes(frames, "little")), dtype=torch.uint8)


def _count_runs(bits: int) -> int:
    """Return the number of runs of consecutive frames."""
    return (bits & ~(bits << 8)).bit_count()


def _rectangles_of_union(batch: Span, rows: Span, union: int, common: int, rule: DenseRule) -> Iterator[Rectangle]:
    """Yield the rectangles of rows: at least one row attends to each frame of `union`, and all rows attend to
    each frame of `common`."""
    if not union:
        return
    frames, common = rule.visible.shape[-1], union & common
    if _count_runs(common) + _count_runs(union & ~common) > MAX_SEGMENTS:
        units = _as_table(union, frames).nonzero().flatten()
        if _count_runs(union) == 1:
            yield from masked_rectangles(batch, rows, (int(units[0]), int(units[-1]) + 1), rule.tokens, rule)
        else:
            yield from _gathered(batch, rows, units, common == union, rule)
        return
    state = _as_table(union, frames) + _as_table(common, frames)  # 0: no row attends to the frame, 1: some rows, 2: all
    edges = [0, *(state.diff().nonzero().flatten() + 1).tolist(), frames]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        if state[start] == 2:
            yield Rectangle(batch, rows, (start * rule.tokens, stop * rule.tokens))
        elif state[start] == 1:
            yield from masked_rectangles(batch, rows, (start, stop), rule.tokens, rule)


def _gathered(batch: Span, rows: Span, units: Tensor, full: bool, rule: DenseRule) -> Iterator[Rectangle]:
    """Yield the frames `units` without the gaps, at most `MAX_GATHERED` keys at a time; `full`: all rows attend to
    them."""
    for some in units.split(max(1, MAX_GATHERED // rule.tokens)):
        gathered, keys = KeySelection(some, rule.tokens), (0, some.numel() * rule.tokens)
        if full:
            yield Rectangle(batch, rows, keys, gathered=gathered)
            continue
        for part in masked_rectangles(batch, rows, (0, some.numel()), rule.tokens, replace(rule, gathered=gathered)):
            yield replace(part, gathered=gathered)
