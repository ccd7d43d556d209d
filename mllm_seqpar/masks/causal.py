"""The causal mask of sharded text, including padding, packed sequences and sliding windows.

In every layout a rank holds its tokens in ascending order, so a row sees one interval of another rank's keys, cut by
padding. Blocks in the future are empty, blocks in the past are full, and the rest are causal squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.errors import MaskError
from mllm_seqpar.sharding import sequence_positions

from .block_masks import BlockMasks, FoldedBlockMasks
from .intervals import interval_rectangles
from .rectangles import Rectangle


class CausalBlockMasks(BlockMasks):
    """Row p sees the keys ``first[p] <= key <= p`` that are `valid`; positions are global, rectangles local to a block.

    Self-attention moves K and V, so all rows are kept for every block (`visible_rows` is None).

    Args:
        batch: batch size.
        total: tokens of all ranks, padding included.
        size: number of ranks.
        layout: how token positions map to ranks.
        first: (B or 1, total) int64 or None: the first key that a row sees (sliding window, packed sequences).
        valid: (B or 1, total) bool or None: False for padding, which no row sees.
    """

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
        self._rectangles: dict[tuple[int, int], tuple[Rectangle, ...]] = {}
        self._folded: FoldedBlockMasks | None = None
        self._orders: dict[tuple[int, torch.device], list[Tensor]] = {}
        self._merged: dict[int, CausalBlockMasks] = {}

    def rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        if (q_shard, kv_shard) not in self._rectangles:
            rows, keys = self.positions[q_shard], self.positions[kv_shard]
            high = torch.searchsorted(keys, rows, right=True).expand(self.batch, -1)
            low = torch.zeros_like(high)
            if self.first is not None:
                low = torch.searchsorted(keys, self.first[:, rows].contiguous())
            valid = None if self.valid is None else self.valid[:, keys]
            self._rectangles[q_shard, kv_shard] = interval_rectangles(low, high, keys.numel(), 1, valid)
        return self._rectangles[q_shard, kv_shard]

    def folded(self) -> BlockMasks:
        if self.batch == 1:
            return self
        if self._folded is None:
            self._folded = FoldedBlockMasks(self, self.positions[0].numel())
        return self._folded

    def orders(self, size: int, device: torch.device) -> list[Tensor]:
        """Return the permutations that restore the order of the text within every group of `size` ranks."""
        if (size, device) not in self._orders:
            orders = [group.argsort() for group in self._group_positions(size)]
            self._orders[size, device] = [copy_to_device(order, device) for order in orders]
        return self._orders[size, device]

    def merged(self, size: int, orders: Sequence[Tensor] | None) -> CausalBlockMasks:
        """Return the masks with every `size` consecutive ranks as one, their tokens in the order of the text."""
        assert orders is not None, "rows of text are merged in order"
        if size not in self._merged:
            merged = CausalBlockMasks(self.batch, self._total, 1, "contiguous", self.first, self.valid)
            merged.positions = [group.sort().values for group in self._group_positions(size)]
            self._merged[size] = merged
        return self._merged[size]

    def reordered(self, ranks: Sequence[int]) -> CausalBlockMasks:
        masks = CausalBlockMasks(self.batch, self._total, 1, "contiguous", self.first, self.valid)
        masks.positions = [self.positions[rank] for rank in ranks]
        return masks

    def _group_positions(self, size: int) -> list[Tensor]:
        return [torch.cat(self.positions[i : i + size]) for i in range(0, len(self.positions), size)]
