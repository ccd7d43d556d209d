"""Tiles of masks given as a table (row, frame), which may have holes.

Each row's visible frames are one Python integer with a bit per frame, so that unions, intersections and counts over
thousands of frames are single machine-speed operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .tiles import WASTE, Span, Tile, masked_tiles

MAX_SEGMENTS = 64  # rectangles that one group of rows may fall into; beyond, it is one, masked


@dataclass(frozen=True)
class DenseRule:
    """Row (b, r) sees the keys of frame f when ``visible[b, r, f]``; visible (B, rows, frames) bool on the CPU."""

    visible: Tensor
    tokens: int

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        """The bool mask (batch, rows, keys) of one tile."""
        first, last = keys[0] // self.tokens, -(-keys[1] // self.tokens)
        seen = self.visible[slice(*batch), slice(*rows), first:last].to(device, non_blocking=True)
        start = keys[0] - first * self.tokens
        return seen.repeat_interleave(self.tokens, dim=-1)[..., start : start + keys[1] - keys[0]]


def dense_tiles(visible: Tensor, tokens: int) -> tuple[Tile, ...]:
    """The tiles of a block whose row (b, r) sees frame f when visible[b, r, f]; (B, rows, frames) bool on the CPU."""
    batch, rows, frames = visible.shape
    if not visible.numel():
        return ()
    rule = DenseRule(visible, tokens)
    alike = all(torch.equal(visible[0], visible[b]) for b in range(1, batch))
    spans = [(0, batch)] if alike else [(b, b + 1) for b in range(batch)]
    return tuple(tile for span in spans for tile in _tiles_of_rows(span, visible[span[0]], rule))


def _tiles_of_rows(batch: Span, visible: Tensor, rule: DenseRule) -> Iterator[Tile]:
    bits = [_as_bits(row) for row in visible]
    top, seen, union, common = 0, 0, 0, -1  # the group that is being grown: its rows start at `top`
    for row, these in enumerate(bits):
        if row > top and (row + 1 - top) * (union | these).bit_count() > WASTE * (seen + these.bit_count()):
            yield from _tiles_of_group(batch, (top, row), union, common, rule)
            top, seen, union, common = row, 0, 0, -1
        seen, union, common = seen + these.bit_count(), union | these, common & these
    yield from _tiles_of_group(batch, (top, len(bits)), union, common, rule)


def _as_bits(row: Tensor) -> int:
    """Frame f is bit 8 f, so that the bytes of the bool tensor are the number."""
    return int.from_bytes(row.contiguous().view(torch.uint8).numpy().tobytes(), "little")


def _tiles_of_group(batch: Span, rows: Span, union: int, common: int, rule: DenseRule) -> Iterator[Tile]:
    if not union:
        return
    frames = rule.visible.shape[-1]
    # 0 nobody sees the frame, 1 some rows do, 2 all do
    some, every = union.to_bytes(frames, "little"), (common & union).to_bytes(frames, "little")
    state = torch.frombuffer(bytearray(some + every), dtype=torch.uint8).view(2, frames).sum(0)
    edges = [0, *(state.diff().nonzero().flatten() + 1).tolist(), frames]
    if len(edges) > MAX_SEGMENTS:
        seen = state.nonzero().flatten()
        yield from masked_tiles(batch, rows, (int(seen[0]), int(seen[-1]) + 1), rule.tokens, rule)
        return
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        if state[start] == 2:
            yield Tile(batch, rows, (start * rule.tokens, stop * rule.tokens))
        elif state[start] == 1:
            yield from masked_tiles(batch, rows, (start, stop), rule.tokens, rule)
