"""Tiles of masks given as a table (row, frame), which may have holes.

Each row's visible frames are one Python integer with a bit per frame, so that unions and counts over thousands of
frames are single machine-speed operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .rectangles import WASTE, KeySelection, Rectangle, Span, masked_rectangles

MAX_SEGMENTS = 16
"""Rectangles that one group of rows may fall into; beyond, the keys that it sees are gathered into one."""

MAX_PICKED = 1 << 16
"""Keys that are gathered at a time: with 4 heads of 128 in 2 bytes, 128 MiB of K and V."""


@dataclass(frozen=True)
class DenseRule:
    """Row (b, r) sees the keys of frame f when ``visible[b, r, f]``; visible (B, rows, frames) bool on the CPU.

    With `picked`, (u,) int64 in ascending order, only those frames count, as if they lay side by side.
    """

    visible: Tensor
    tokens: int
    picked: Tensor | None = None
    _on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        """The bool mask (batch, rows, keys) of one tile."""
        first, last = keys[0] // self.tokens, -(-keys[1] // self.tokens)
        if device not in self._on:  # moved once, for all tiles and layers: each copy would hold the host up
            self._on[device] = self.visible.to(device)
        seen = self._on[device][slice(*batch), slice(*rows)]
        if self.picked is None:
            seen = seen[..., first:last]
        else:
            seen = seen.index_select(-1, self.picked[first:last].to(device, non_blocking=True))
        start = keys[0] - first * self.tokens
        expanded = seen.repeat_interleave(self.tokens, dim=-1)
        return expanded[..., start : start + keys[1] - keys[0]]


def dense_rectangles(visible: Tensor, tokens: int) -> tuple[Rectangle, ...]:
    """The tiles of a block whose row (b, r) sees frame f when visible[b, r, f]; (B, rows, frames) bool on the CPU."""
    batch, rows, frames = visible.shape
    if not visible.numel():
        return ()
    rule = DenseRule(visible, tokens)
    alike = all(torch.equal(visible[0], visible[b]) for b in range(1, batch))
    spans = [(0, batch)] if alike else [(b, b + 1) for b in range(batch)]
    return tuple(tile for span in spans for tile in _tiles_of_rows(span, visible[span[0]], rule))


def _tiles_of_rows(batch: Span, visible: Tensor, rule: DenseRule) -> Iterator[Rectangle]:
    top, seen, union, common = 0, 0, 0, -1  # the group that is being grown: its rows start at `top`
    for row, these in enumerate(map(_as_bits, visible)):
        count = these.bit_count()
        if row > top and (row + 1 - top) * (union | these).bit_count() > WASTE * (seen + count):
            yield from _tiles_of_group(batch, (top, row), union, common, rule)
            top, seen, union, common = row, 0, 0, -1
        seen, union, common = seen + count, union | these, common & these
    yield from _tiles_of_group(batch, (top, visible.shape[0]), union, common, rule)


def _as_bits(row: Tensor) -> int:
    """Frame f is bit 8 f, so that the bytes of the bool tensor are the number."""
    return int.from_bytes(row.contiguous().view(torch.uint8).numpy().tobytes(), "little")


def _as_table(bits: int, frames: int) -> Tensor:
    """The inverse of `_as_bits`, (frames,) uint8."""
    return torch.frombuffer(bytearray(bits.to_bytes(frames, "little")), dtype=torch.uint8)


def _runs(bits: int) -> int:
    """How many runs of neighbouring frames there are."""
    return (bits & ~(bits << 8)).bit_count()


def _tiles_of_group(batch: Span, rows: Span, union: int, common: int, rule: DenseRule) -> Iterator[Rectangle]:
    if not union:
        return
    frames, every = rule.visible.shape[-1], union & common
    if _runs(every) + _runs(union & ~every) > MAX_SEGMENTS:
        units = _as_table(union, frames).nonzero().flatten()
        if _runs(union) == 1:
            yield from masked_rectangles(batch, rows, (int(units[0]), int(units[-1]) + 1), rule.tokens, rule)
        else:
            yield from _gathered(batch, rows, units, every == union, rule)
        return
    state = _as_table(union, frames) + _as_table(every, frames)  # 0 nobody sees the frame, 1 some rows do, 2 all do
    edges = [0, *(state.diff().nonzero().flatten() + 1).tolist(), frames]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        if state[start] == 2:
            yield Rectangle(batch, rows, (start * rule.tokens, stop * rule.tokens))
        elif state[start] == 1:
            yield from masked_rectangles(batch, rows, (start, stop), rule.tokens, rule)


def _gathered(batch: Span, rows: Span, units: Tensor, full: bool, rule: DenseRule) -> Iterator[Rectangle]:
    """The frames `units` as one rectangle, a limited number of keys at a time; `full`: all rows see all of them."""
    for some in units.split(max(1, MAX_PICKED // rule.tokens)):
        picked, keys = KeySelection(some, rule.tokens), (0, some.numel() * rule.tokens)
        if full:
            yield Rectangle(batch, rows, keys, picked=picked)
            continue
        for tile in masked_rectangles(batch, rows, (0, some.numel()), rule.tokens, replace(rule, picked=some)):
            yield replace(tile, picked=picked)
