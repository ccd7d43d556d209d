"""Mask rectangles: how the mask of an attention block is cut into parts that a block kernel computes.

The mask of a block (rows of one rank, keys of another) is never expanded as a whole. Invisible parts are left out,
entirely visible parts need no mask, a staircase of step one is a causal square, and only the rest is expanded, one
rectangle of at most `MAX_MASK` entries at a time. Rows are merged into one rectangle only while at most a quarter more
entries are computed than are visible, so a mask that hides most of the work saves that work.

If the visible units are scattered, with more gaps than rectangles are worth, their keys are gathered and computed as
one rectangle without the gaps (`KeySelection`).

Coordinates are local to the block. Masks count in units (frames, or single tokens) of `tokens` keys each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device

MAX_MASK = 1 << 22
"""Entries of one expanded mask: 4 MiB as bool, 16 MiB as a float32 bias."""

MAX_WASTE = 1.25
"""Computed entries per visible entry up to which rows are merged into one rectangle."""

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

    Kind "full": every row sees every key. "causal": as many rows as keys, row i sees keys up to i. "masked": as
    `rule` says. With `gathered`, `keys` is a span of the selected keys.
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
    above = first - rectangle.rows[0]  # rows that are cut off at the top; all remaining rows see their keys
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
