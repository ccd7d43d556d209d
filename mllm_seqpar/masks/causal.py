"""The causal mask of sharded text, including padding, packed sequences and sliding windows.

In every layout a rank holds its tokens in ascending order, so a row sees one interval of another rank's keys, cut by
padding. Blocks in the future are empty, blocks in the past are full, and the rest are causal squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.errors import MaskError
from mllm_seqpar.sharding import sequence_positions

from .block_masks import BlockMasks, FoldedBlockMasks, RankGroups
from .intervals import interval_rectangles
from .rectangles import Rectangle, Span, masked_rectangles


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
        self._orders: dict[tuple[RankGroups, torch.device], list[Tensor]] = {}
        self._merged: dict[RankGroups, CausalBlockMasks] = {}

    def rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        if (q_shard, kv_shard) not in self._rectangles:
            rows, keys = self.positions[q_shard], self.positions[kv_shard]
            first = None if self.first is None else self.first[:, rows]
            valid = None if self.valid is None else self.valid[:, keys]
            self._rectangles[q_shard, kv_shard] = causal_rectangles(self.batch, rows, keys, first, valid)
        return self._rectangles[q_shard, kv_shard]

    def folded(self) -> BlockMasks:
        if self.batch == 1:
            return self
        if self._folded is None:
            self._folded = FoldedBlockMasks(self, self.positions[0].numel())
        return self._folded

    def orders(self, groups: RankGroups, device: torch.device) -> list[Tensor]:
        """Return the permutations that restore the order of the text within every group of ranks."""
        if (groups, device) not in self._orders:
            orders = [positions.argsort() for positions in self._group_positions(groups)]
            self._orders[groups, device] = [copy_to_device(order, device) for order in orders]
        return self._orders[groups, device]

    def merged(self, groups: RankGroups, orders: Sequence[Tensor] | None) -> CausalBlockMasks:
        """Return the masks with each group of ranks as one rank, their tokens in the order of the text."""
        assert orders is not None, "rows of text are merged in order"
        if groups not in self._merged:
            merged = CausalBlockMasks(self.batch, self._total, 1, "contiguous", self.first, self.valid)
            merged.positions = [positions.sort().values for positions in self._group_positions(groups)]
            self._merged[groups] = merged
        return self._merged[groups]

    def _group_positions(self, groups: RankGroups) -> list[Tensor]:
        return [torch.cat([self.positions[rank] for rank in group]) for group in groups]


def causal_rectangles(
    batch: int, rows: Tensor, keys: Tensor, first: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Rectangle, ...]:
    """Return the mask rectangles of rows at some positions against keys at some positions, both (n,) ascending.

    Args:
        batch: batch size.
        rows, keys: positions in the text.
        first: (B or 1, rows), the first position that a row attends to; None: 0.
        valid: (B or 1, keys) bool, False for padding; None: all.
    """
    high = torch.searchsorted(keys, rows, right=True).expand(batch, -1)
    low = torch.zeros_like(high) if first is None else torch.searchsorted(keys, first.contiguous()).expand(batch, -1)
    return interval_rectangles(low, high, keys.numel(), 1, None if valid is None else valid.expand(batch, -1))


@dataclass(frozen=True)
class _DecoderMask:
    visible: Tensor  # (B or 1, L, K) bool

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        part = self.visible if self.visible.shape[0] == 1 else self.visible[slice(*batch)]
        return part[:, slice(*rows), slice(*keys)].to(device)


def decoder_rectangles(mask: Tensor | None, batch: int, rows: int, keys: int) -> Iterator[Rectangle]:
    """Yield the mask rectangles of the last `rows` tokens of a text against its `keys` tokens.

    `mask` is (B or 1, 1, rows, keys) as transformers prepares it, perhaps with more keys, or None for a causal mask
    without padding.
    """
    if mask is None:
        cached = keys - rows
        if cached:
            yield Rectangle((0, batch), (0, rows), (0, cached))
        yield Rectangle((0, batch), (0, rows), (cached, keys), "causal")
        return
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise MaskError(
            f"attention_mask: expected (B, 1, rows, keys) as transformers prepares it, got {tuple(mask.shape)}"
        )
    visible = mask[:, 0, :, :keys]
    rule = _DecoderMask(visible if visible.dtype is torch.bool else visible >= 0)
    yield from masked_rectangles((0, batch), (0, rows), (0, keys), 1, rule)
