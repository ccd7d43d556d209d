"""Cutting a mask into rectangles that a block kernel computes: all visible, lower-triangular, or bounded and masked.

A mask over one block (rows of one rank, keys of another) is never expanded as a whole. What is invisible is cut away,
what is entirely visible needs no mask, a staircase of step one is a causal square, and only what remains is expanded,
tile by tile, to at most `MAX_MASK` entries. Rows are merged into one tile only while at most a quarter more than the
visible entries is computed, so a mask that hides most of the work makes that work vanish.

Where the visible units lie scattered, with more gaps between them than rectangles are worth, their keys are gathered
and computed as if they were neighbours (`KeySelection`): then no gap is computed either, and it is one rectangle.

Coordinates are local to the block. Masks speak of units (frames, or single tokens) of `tokens` keys each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from .row_subset import RowSubset

MAX_MASK = 1 << 22  # entries of an expanded mask tile: 4 MiB as bool, 16 MiB as a float32 bias
WASTE = 1.25  # computed entries per visible entry that merging rows into one tile may cost

Span = tuple[int, int]


class Rule(Protocol):
    """Says which keys of a block which rows see."""

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        """The bool mask (batch, rows, keys) of one tile, True where visible."""


@dataclass(frozen=True)
class KeySelection:
    """Some units of a block, of `tokens` keys each, as if they lay side by side; units (u,) int64 on the CPU."""

    units: Tensor
    tokens: int

    def keys(self, span: Span, device: torch.device) -> Tensor:
        """Where in the block the keys of a span of the picked ones are, ascending (T,) int64."""
        first, last = span[0] // self.tokens, -(-span[1] // self.tokens)
        starts = self.units[first:last].to(device, non_blocking=True) * self.tokens
        keys = (starts.unsqueeze(-1) + torch.arange(self.tokens, device=device)).flatten()
        return keys[span[0] - first * self.tokens :][: span[1] - span[0]]


@dataclass(frozen=True)
class Rectangle:
    """One rectangle of a block: batch items, query rows and keys as half-open spans.

    kind "full": every row sees every key; "causal": as many rows as keys, row i sees keys up to i; "masked": by `rule`.
    With `picked`, `keys` is a span of those keys.
    """

    batch: Span
    rows: Span
    keys: Span
    kind: Literal["full", "causal", "masked"] = "full"
    rule: Rule | None = None
    picked: KeySelection | None = None

    @property
    def entries(self) -> int:
        """Score entries computed per head."""
        batch, rows, keys = (stop - start for start, stop in (self.batch, self.rows, self.keys))
        return batch * (rows * (rows + 1) // 2 if self.kind == "causal" else rows * keys)

    def places(self, device: torch.device) -> slice | Tensor:
        """What selects this tile's keys among those of the block."""
        return slice(*self.keys) if self.picked is None else self.picked.keys(self.keys, device)

    def mask(self, device: torch.device) -> Tensor | None:
        """The expanded mask of a "masked" tile, else None."""
        return self.rule.expand(self.batch, self.rows, self.keys, device) if self.rule is not None else None


class BlockMasks(Protocol):
    """The tiles of every block (row, column) of a distributed attention; the same on every rank, and never changed."""

    @property
    def prunes(self) -> bool:
        """Whether any rank has rows that see nothing of some other rank, so that `rows` says less than all."""

    def tiles(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """What to compute of attend(Q_row, KV_column); empty when no row sees any key."""

    def rows(self, row: int, column: int) -> RowSubset | None:
        """The rows of rank `row` that see any key of rank `column`, in any batch item; None: take them all."""

    def packed(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """The tiles of the block that has only the rows `rows`, side by side."""

    def folded(self) -> BlockMasks:
        """The same with the batch folded into the rows, item after item; see `mllm_seqpar.masks.folded_batch`."""

    @property
    def keys_are_rows(self) -> bool:
        """Whether keys stand for the same tokens as rows, so that they are put in order together."""

    def orders(self, size: int, device: torch.device) -> Sequence[Tensor] | None:
        """For every `size` consecutive ranks, what puts their rows, one rank after another, in a better order."""

    def merged(self, size: int, orders: Sequence[Tensor] | None) -> BlockMasks:
        """The same when every `size` consecutive ranks are one, its rows in these orders (None: rank after rank)."""


def clip_rows(tile: Rectangle, start: int, stop: int) -> Iterator[Rectangle]:
    """The part of `tile` whose rows lie in start <= row < stop, as zero, one or two tiles."""
    first, last = max(tile.rows[0], start), min(tile.rows[1], stop)
    if first >= last:
        return
    if tile.kind != "causal":
        yield replace(tile, rows=(first, last))
        return
    above = first - tile.rows[0]  # rows cut off at the top: their keys are seen by all that remain
    key = tile.keys[0]
    if above:
        yield replace(tile, rows=(first, last), keys=(key, key + above), kind="full")
    yield replace(tile, rows=(first, last), keys=(key + above, key + last - tile.rows[0]))


def full_rectangle(batch: int, rows: int, keys: int) -> tuple[Rectangle, ...]:
    """The tiles of a block without a mask."""
    return (Rectangle((0, batch), (0, rows), (0, keys)),) if batch and rows and keys else ()


def masked_rectangles(batch: Span, rows: Span, units: Span, tokens: int, rule: Rule) -> Iterator[Rectangle]:
    """A masked rectangle cut so that no expanded mask exceeds `MAX_MASK` entries."""
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


@dataclass(frozen=True)
class GivenBlockMask:
    """The one block of a group of one, by its tiles; its keys have the batch of its rows."""

    given: tuple[Rectangle, ...]

    prunes = False
    keys_are_rows = False

    def tiles(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """Return the tiles of the one block."""
        return self.given

    def rows(self, row: int, column: int) -> RowSubset | None:
        """Return None: all rows."""
        return None

    def packed(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """Return the same as `tiles`."""
        return self.given

    def folded(self) -> GivenBlockMask:
        """Not folded: its keys have a batch."""
        raise NotImplementedError("keys of one block with a batch of their own are not folded")

    def orders(self, size: int, device: torch.device) -> None:
        """Keep the order."""

    def merged(self, size: int, orders: Sequence[Tensor] | None) -> GivenBlockMask:
        """Return itself: there are no other ranks."""
        return self


@dataclass(frozen=True)
class FullBlockMasks:
    """No mask: each of `length` rows sees every key. `key_lengths[j]` is the number of keys that rank j holds."""

    batch: int
    length: int
    key_lengths: tuple[int, ...]

    prunes = False
    keys_are_rows = False

    def tiles(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """One tile, or none where rank `column` holds no keys."""
        return full_rectangle(self.batch, self.length, self.key_lengths[column])

    def rows(self, row: int, column: int) -> RowSubset | None:
        """All of them, also where there are no keys: without a mask every rank sends as much as its formula says."""
        return None

    def packed(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """The same as `tiles`."""
        return self.tiles(row, column)

    def folded(self) -> FullBlockMasks:
        """As many rows in one batch item."""
        return FullBlockMasks(1, self.batch * self.length, self.key_lengths)

    def orders(self, size: int, device: torch.device) -> None:
        """Any order will do."""

    def merged(self, size: int, orders: Sequence[Tensor] | None) -> FullBlockMasks:
        """As many rows and keys together."""
        lengths = [self.key_lengths[i : i + size] for i in range(0, len(self.key_lengths), size)]
        return FullBlockMasks(self.batch, self.length * size, tuple(map(sum, lengths)))
