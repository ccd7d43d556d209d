"""Rectangles of masks that are given as a table (row, frame), which may have holes.

The visible frames of a row are one Python integer with a bit per frame, which makes unions and counts over thousands of
frames single operations at machine speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device

from .rectangles import MAX_WASTE, KeySelection, Rectangle, Span, batch_spans, masked_rectangles

MAX_SEGMENTS = 16
"""One group of rows is cut into at most this many rectangles. If there are more, the keys that it attends to are
gathered instead."""

MAX_GATHERED = 1 << 16
"""Keys that are gathered at a time: 128 MiB of K and V with 4 heads of 128 in 2 bytes."""


@dataclass(frozen=True)
class DenseRule:
    """Row (b, r) attends to the keys of frame f if ``visible[b, r, f]``; visible (B, rows, frames) bool on the CPU.

    With `gathered`, only the frames that it selects count, numbered without the gaps.
    """

    visible: Tensor
    tokens: int
    gathered: KeySelection | None = None
    _by_device: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        first, last = keys[0] // self.tokens, -(-keys[1] // self.tokens)
        if device not in self._by_device:  # copied once for all rectangles and layers
            self._by_device[device] = copy_to_device(self.visible, device)
        visible = self._by_device[device][slice(*batch), slice(*rows)]
        if self.gathered is None:
            visible = visible[..., first:last]
        else:
            visible = visible.index_select(-1, self.gathered.units_on(device)[first:last])
        start = keys[0] - first * self.tokens
        expanded = visible.repeat_interleave(self.tokens, dim=-1)
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
    return tuple(r for span in batch_spans(visible) for r in _rectangles_of_rows(span, visible[span[0]], rule))


def _rectangles_of_rows(batch: Span, visible: Tensor, rule: DenseRule) -> Iterator[Rectangle]:
    """Merge consecutive rows into groups while `MAX_WASTE` allows it, and yield the rectangles of each group."""
    top, total, union, common = 0, 0, 0, -1  # of the current group, whose rows start at `top`
    for row, frames in enumerate(map(_as_bits, visible)):
        count = frames.bit_count()
        if row > top and (row + 1 - top) * (union | frames).bit_count() > MAX_WASTE * (total + count):
            yield from _rectangles_of_group(batch, (top, row), union, common, rule)
            top, total, union, common = row, 0, 0, -1
        total, union, common = total + count, union | frames, common & frames
    yield from _rectangles_of_group(batch, (top, visible.shape[0]), union, common, rule)


def _as_bits(row: Tensor) -> int:
    """Return the frames (frames,) bool as an integer. Frame f is bit 8 f, so the bytes of the tensor are the number."""
    return int.from_bytes(row.contiguous().view(torch.uint8).numpy().tobytes(), "little")


def _as_table(bits: int, frames: int) -> Tensor:
    """Return the inverse of `_as_bits`, (frames,) uint8."""
    return torch.frombuffer(bytearray(bits.to_bytes(frames, "little")), dtype=torch.uint8)


def _count_runs(bits: int) -> int:
    """Return the number of runs of consecutive frames."""
    return (bits & ~(bits << 8)).bit_count()


def _rectangles_of_group(batch: Span, rows: Span, union: int, common: int, rule: DenseRule) -> Iterator[Rectangle]:
    """Yield the rectangles of rows: at least one row attends to each frame of `union`, and all attend to those of
    `common`."""
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
