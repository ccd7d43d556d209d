"""The batch folded into rows: (B, rows) becomes (1, B * rows), item after item.

All samples' frames are one flat list, so their keys have a batch of 1 while queries have one of B. Rows know nothing of
each other, so the queries of all items can be the rows of one item: kernels then need one call where they needed B, and
a row travels only where it sees something, whatever the other samples see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .rectangles import BlockMasks, Rectangle, Rule, Span
from .row_subset import RowSubset


@dataclass(frozen=True)
class _OfItem:
    """The rule of batch item `item`, whose rows begin at `start` of the folded ones."""

    rule: Rule
    item: int
    start: int

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        """The bool mask (1, rows, keys) of one tile."""
        own = rows[0] - self.start, rows[1] - self.start
        return self.rule.expand((self.item, self.item + 1), own, keys, device)


def folded_rectangles(tiles: tuple[Rectangle, ...], rows: int) -> tuple[Rectangle, ...]:
    """Tiles of a block with `rows` rows per batch item -> the same of the block with the batch folded into its rows."""
    found = []
    for tile in tiles:
        for item in range(*tile.batch):
            start = item * rows
            rule = None if tile.rule is None else _OfItem(tile.rule, item, start)
            found.append(replace(tile, batch=(0, 1), rows=(start + tile.rows[0], start + tile.rows[1]), rule=rule))
    return tuple(found)


class FoldedBlockMasks:
    """Any blocks whose rows are `rows` to a batch item and rank, with the batch folded; all rows see something."""

    prunes = False
    keys_are_rows = False

    def __init__(self, blocks: BlockMasks, rows: int) -> None:
        self._blocks, self._rows = blocks, rows
        self._tiles: dict[tuple[int, int], tuple[Rectangle, ...]] = {}

    def tiles(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """Those of the blocks, item by item."""
        if (row, column) not in self._tiles:
            self._tiles[row, column] = folded_rectangles(self._blocks.tiles(row, column), self._rows)
        return self._tiles[row, column]

    def rows(self, row: int, column: int) -> RowSubset | None:
        """All of them."""
        return None

    def packed(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """The same as `tiles`."""
        return self.tiles(row, column)

    def folded(self) -> BlockMasks:
        """Itself."""
        return self

    def orders(self, size: int, device: torch.device) -> None:
        """None: what is folded stays as it is."""

    def merged(self, size: int, orders: Sequence[Tensor] | None) -> BlockMasks:
        """Not after folding: ranks are merged first."""
        raise NotImplementedError("merge blocks before folding them")
