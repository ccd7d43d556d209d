"""The causal mask of a text whose tokens are dealt to ranks: padding, packed sequences and sliding windows included.

In every layout a rank's tokens are in ascending order, so what a row sees of another rank's keys is one interval of
them, cut by padding. Blocks in the future come out empty, blocks in the past full, the rest causal squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mllm_seqpar.errors import MaskError
from mllm_seqpar.sharding import sequence_positions

from .folded_batch import FoldedBlockMasks
from .intervals import interval_rectangles
from .rectangles import BlockMasks, Rectangle
from .row_subset import RowSubset


class CausalBlockMasks:
    """Row p sees the keys ``first[p] <= key <= p`` that are `valid`; positions are global, tiles local to a block.

    Args:
        batch: batch size.
        total: tokens of all ranks together, padding included.
        size: ranks.
        layout: how tokens are dealt to them.
        first: (B or 1, total) int64 or None: the first key that row may see (sliding window, packed sequences).
        valid: (B or 1, total) bool or None: keys that may be seen at all (padding).
    """

    prunes = False
    keys_are_rows = True

    def __init__(
        self,
        batch: int,
        total: int,
        size: int,
        layout: str,
        first: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        for name, tensor in (("first", first), ("valid", valid)):
            if tensor is not None and (tensor.shape[-1] != total or tensor.shape[0] not in (1, batch)):
                raise MaskError(f"CausalBlockMasks: {name} is {tuple(tensor.shape)}; expected ({batch} or 1, {total})")
        self.batch = batch
        self.positions = [sequence_positions(total, rank, size, layout) for rank in range(size)]
        self._total = total
        self.first = None if first is None else first.detach().cpu().expand(batch, total)
        self.valid = None if valid is None or bool(valid.all()) else valid.detach().bool().cpu().expand(batch, total)
        self._tiles: dict[tuple[int, int], tuple[Rectangle, ...]] = {}
        self._folded: FoldedBlockMasks | None = None
        self._orders: dict[tuple[int, torch.device], list[Tensor]] = {}
        self._merged: dict[int, CausalBlockMasks] = {}

    def tiles(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """Planned on first use, then kept for the other layers and for the backward pass."""
        if (row, column) not in self._tiles:
            rows, keys = self.positions[row], self.positions[column]
            high = torch.searchsorted(keys, rows, right=True).expand(self.batch, -1)
            low = torch.zeros_like(high)
            if self.first is not None:
                low = torch.searchsorted(keys, self.first[:, rows].contiguous())
            valid = None if self.valid is None else self.valid[:, keys]
            self._tiles[row, column] = interval_rectangles(low, high, keys.numel(), 1, valid)
        return self._tiles[row, column]

    def rows(self, row: int, column: int) -> RowSubset | None:
        """All of them: text attends to itself by moving K and V, and its rows stay at home."""
        return None

    def packed(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """The same as `tiles`."""
        return self.tiles(row, column)

    def folded(self) -> BlockMasks:
        """The same item by item, for batch items that share their keys."""
        if self.batch == 1:
            return self
        if self._folded is None:
            self._folded = FoldedBlockMasks(self, self.positions[0].numel())
        return self._folded

    def orders(self, size: int, device: torch.device) -> list[Tensor]:
        """What puts the tokens of every `size` ranks back in the order of the text, in which they are few tiles."""
        if (size, device) not in self._orders:
            groups = [self.positions[i : i + size] for i in range(0, len(self.positions), size)]
            self._orders[size, device] = [torch.cat(group).argsort().to(device) for group in groups]
        return self._orders[size, device]

    def merged(self, size: int, orders: Sequence[Tensor] | None) -> CausalBlockMasks:
        """With the tokens of every `size` ranks in the order of the text; kept for the other layers."""
        assert orders is not None, "rows of text are merged in order"
        if size not in self._merged:
            merged = CausalBlockMasks(self.batch, self._total, 1, "contiguous", self.first, self.valid)
            groups = [self.positions[i : i + size] for i in range(0, len(self.positions), size)]
            merged.positions = [torch.cat(group).sort().values for group in groups]
            self._merged[size] = merged
        return self._merged[size]
