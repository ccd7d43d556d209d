"""The masks of all attention blocks of a call: the interface that the executor uses, forms without a rule, causal text.

The causal mask of sharded text includes padding, packed sequences and sliding windows. In every layout a rank holds its
tokens in ascending order, so a row attends to one interval of another rank's keys, cut by padding. Blocks in the future
are empty, blocks in the past are full, and the rest are causal squares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.errors import MaskError
from mllm_seqpar.sharding import sequence_positions

from .rectangles import DenseRule, Rectangle, full_rectangle, interval_rectangles, masked_rectangles

RankGroups = Sequence[tuple[int, ...]]
"""The ranks of each of several groups, in the order of the groups' rows and keys."""


class RowSubset:
    """Row numbers of one rank in ascending order: the rows that have to be sent to some other rank.

    Attributes:
        index: the numbers, (r,) int64 on the CPU.
        count: how many.
    """

    def __init__(self, index: Tensor) -> None:
        self.index, self.count = index, index.numel()
        self._by_device: dict[torch.device, Tensor] = {}
        first = int(index[0]) if self.count else 0
        consecutive = not self.count or int(index[-1]) - first + 1 == self.count
        self._span = slice(first, first + self.count) if consecutive else None

    def index_on(self, device: torch.device) -> slice | Tensor:
        """Return what selects these rows of a tensor on `device`: a slice if they are consecutive."""
        if self._span is not None:
            return self._span
        if device not in self._by_device:
            self._by_device[device] = copy_to_device(self.index, device)
        return self._by_device[device]

    def select(self, x: Tensor) -> Tensor:
        """x (B, H, S, ...) -> these rows of it, (B, H, r, ...), contiguous."""
        index = self.index_on(x.device)
        return x[:, :, index].contiguous() if isinstance(index, slice) else x.index_select(2, index)


class BlockMasks(ABC):
    """The mask rectangles of every block (q_shard, kv_shard) of a distributed attention.

    They are the same on every rank and do not change. Rectangles are planned on first use and kept for the other layers
    and for the backward pass. The defaults here are for masks that never exclude a whole shard.
    """

    keys_are_rows: bool = False
    """True in self-attention: keys stand for the same tokens as rows, and are put in order together with them."""

    @abstractmethod
    def rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        """Return what to compute of attend(Q_i, KV_j); empty if no row attends to any key."""

    @property
    def prunes(self) -> bool:
        """True if some rank has rows that attend to no key of some other rank, so that `visible_rows` omits rows."""
        return False

    def visible_rows(self, q_shard: int, kv_shard: int) -> RowSubset | None:
        """Return the rows of rank `q_shard` that attend to a key of rank `kv_shard` in any batch item; None for all."""
        return None

    def pruned_rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        """Return the rectangles of the block that consists of its `visible_rows` only."""
        return self.rectangles(q_shard, kv_shard)

    def folded(self) -> BlockMasks:
        """Return these masks with the batch folded into the rows, item after item: (B, rows) becomes (1, B * rows).

        The frames of all samples are one flat list, so their keys have a batch of 1 while queries have one of B. Rows
        are independent, so the queries of all items can be the rows of one item. Kernels then need one call instead of
        B, and rows are pruned per sample. Each item has its own text, so masks over text are not folded.
        """
        raise NotImplementedError(f"{type(self).__name__}: the items of a batch do not share keys of text")

    def orders(self, groups: RankGroups, device: torch.device) -> Sequence[Tensor] | None:
        """Return for every group of ranks the order of its rows that needs fewer rectangles.

        Each is a permutation of the rows of the group, one rank after another. None: the order does not matter.
        """
        return None

    @abstractmethod
    def merged(self, groups: RankGroups, orders: Sequence[Tensor] | None) -> BlockMasks:
        """Return the masks with each group of ranks as one rank, its rows in these orders (None: by rank)."""


@dataclass(frozen=True)
class GivenBlockMask(BlockMasks):
    """The one block of a group of one; its keys have the batch of its rows.

    Attributes:
        given: returns the rectangles.
    """

    given: Callable[[], Iterable[Rectangle]]

    def rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        return tuple(self.given())

    def merged(self, groups: RankGroups, orders: Sequence[Tensor] | None) -> GivenBlockMask:
        return self


@dataclass(frozen=True)
class FullBlockMasks(BlockMasks):
    """No mask: each of `length` rows attends to every key. `key_lengths[j]` is the number of keys that rank j holds.

    All rows are sent to all ranks, even to ranks without keys, so that the bytes sent equal the formula.
    """

    batch: int
    length: int
    key_lengths: tuple[int, ...]

    def rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        return full_rectangle(self.batch, self.length, self.key_lengths[kv_shard])

    def folded(self) -> FullBlockMasks:
        return FullBlockMasks(1, self.batch * self.length, self.key_lengths)

    def merged(self, groups: RankGroups, orders: Sequence[Tensor] | None) -> FullBlockMasks:
        lengths = tuple(sum(self.key_lengths[rank] for rank in group) for group in groups)
        return FullBlockMasks(self.batch, self.length * len(groups[0]), lengths)


class CausalBlockMasks(BlockMasks):
    """Row p attends to the keys ``first[p] <= key <= p`` that are `valid`; positions are global, rectangles local to a
    block.

    Self-attention moves K and V, so all rows are kept for every block (`visible_rows` is None).

    Args:
        batch: batch size.
        total: tokens of all ranks, padding included.
        size: number of ranks.
        layout: how token positions map to ranks.
        first: (B or 1, total) int64 or None: the first key that a row attends to (sliding window, packed sequences).
        valid: (B or 1, total) bool or None: False for padding, which no row attends to.
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
        self._orders: dict[tuple[RankGroups, torch.device], list[Tensor]] = {}
        self._merged: dict[RankGroups, CausalBlockMasks] = {}

    def rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        if (q_shard, kv_shard) not in self._rectangles:
            rows, keys = self.positions[q_shard], self.positions[kv_shard]
            first = None if self.first is None else self.first[:, rows]
            valid = None if self.valid is None else self.valid[:, keys]
            self._rectangles[q_shard, kv_shard] = causal_rectangles(self.batch, rows, keys, first, valid)
        return self._rectangles[q_shard, kv_shard]

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
    rule = DenseRule(visible if visible.dtype is torch.bool else visible >= 0, 1)
    yield from masked_rectangles((0, batch), (0, rows), (0, keys), 1, rule)
