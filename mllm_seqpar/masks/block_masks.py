"""The masks of all attention blocks of a call, and the bounds of text: causal, packed, padded, with a sliding window.

What a row attends to is known in global numbers, of frames or of tokens, as `bounds` (K, 2, B or 1, rows): in layer k,
row r attends to the numbers ``bounds[k, 0, b, r] <= x < bounds[k, 1, b, r]``. The keys of a rank belong to ascending
numbers (`HeldKeys`), so a binary search of both bounds among them gives the interval of keys that the row attends to
in the block (`Intervals`), in every layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.errors import MaskError

from .intervals import BlockMask, Intervals, block_mask, runs_of

MAX_RUNS = 4
"""Bounds of keys in at most so many runs of consecutive numbers are computed instead of searched for."""

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


class HeldKeys:
    """The frames or tokens whose keys a rank holds, in the order in which it holds them.

    Args:
        numbers: (u,) int64, their global numbers. Where they descend, a further interval begins.
        sizes: the number of keys of each, (u,) or one number for all.

    Attributes:
        count: the number of keys.
    """

    def __init__(self, numbers: Tensor, sizes: int | Tensor = 1) -> None:
        self.numbers, self.sizes = numbers, sizes
        each = sizes.cumsum(0) if isinstance(sizes, Tensor) else torch.arange(1, numbers.numel() + 1) * sizes
        self._before = F.pad(each, (1, 0))  # (u + 1,), the keys before each
        self.count = int(self._before[-1])
        steps = numbers.diff()
        breaks = (steps < 0).nonzero().flatten().add(1).tolist()
        self._ascending = list(itertools.pairwise([0, *breaks, numbers.numel()]))
        self._runs = None if breaks or isinstance(sizes, Tensor) else _runs(numbers, steps)

    def local(self, bounds: Tensor) -> Tensor:
        """Return global bounds (K, 2, B or 1, rows) as bounds of these keys, with K layers for each ascending part."""
        if self._runs is not None:
            return self._in_runs(bounds)
        if self.numbers.numel() and bounds.numel() > 4 * int(self.numbers.max()):  # a table is faster than searching
            local = [table[bounds.clamp(max=table.numel() - 1)] for table in self._tables]
        else:
            local = [self._search(bounds.contiguous(), *part) for part in self._ascending]
        return local[0] if len(local) == 1 else torch.cat(local)

    def _in_runs(self, bounds: Tensor) -> Tensor:
        """Return `local` by arithmetic, which takes a tenth of the time of a search among many keys."""
        assert self._runs is not None
        local = None
        for first, step, length in self._runs:
            before = bounds - (first - step + 1)
            before = (before if step == 1 else before.div_(step, rounding_mode="floor")).clamp_(0, length)
            local = before if local is None else local.add_(before)
        return torch.zeros_like(bounds) if local is None else local.mul_(self.sizes) if self.sizes != 1 else local

    def _search(self, bounds: Tensor, start: int, stop: int) -> Tensor:
        return self._before[torch.searchsorted(self.numbers[start:stop], bounds) + start]

    @cached_property
    def _tables(self) -> list[Tensor]:
        """The local bound of every global number, for each ascending part."""
        numbers = torch.arange(int(self.numbers.max()) + 2)
        return [self._search(numbers, *part) for part in self._ascending]

    @staticmethod
    def cat(parts: Sequence[HeldKeys], *, ordered: bool) -> HeldKeys:
        """Return the keys of several ranks, one rank after another or, `ordered`, by their numbers."""
        numbers = torch.cat([part.numbers for part in parts])
        sizes = torch.cat([torch.as_tensor(part.sizes).expand_as(part.numbers) for part in parts])
        if ordered:
            numbers, order = numbers.sort()
            sizes = sizes[order]
        return HeldKeys(numbers, sizes)


def _runs(numbers: Tensor, steps: Tensor) -> list[tuple[int, int, int]] | None:
    """Return ascending numbers as a few runs (first, step, length), as every layout has them; None if they are many."""
    if numbers.numel() < 2:
        return [(int(first), 1, 1) for first in numbers]
    step = int(steps[0])
    if step > 0 and bool((steps == step).all()):
        return [(int(numbers[0]), step, numbers.numel())]
    ends = (steps != 1).nonzero().flatten().add(1).tolist()
    if len(ends) >= MAX_RUNS:
        return None
    return [(int(numbers[a]), 1, b - a) for a, b in itertools.pairwise([0, *ends, numbers.numel()])]


class BlockMasks:
    """The masks of every block (q_shard, kv_shard) of a distributed attention.

    They are the same on every rank and do not change. Each is made on first use, and kept for the other layers and for
    the backward pass.

    Args:
        bounds: of the rows of each rank, in global numbers; see above.
        keys: of each rank.
        prunable: whether rows that attend to no key of a rank are not sent to it.
        keys_are_rows: whether keys stand for the same tokens as rows (self-attention). They are then put in order
            together with them, and the items of a batch have keys of their own.
    """

    def __init__(
        self,
        bounds: Sequence[Tensor],
        keys: Sequence[HeldKeys],
        *,
        prunable: bool = False,
        keys_are_rows: bool = False,
    ) -> None:
        self.bounds, self.keys = list(bounds), list(keys)
        self.prunable, self.keys_are_rows = prunable, keys_are_rows
        self._blocks: dict[tuple[int, int, bool], BlockMask] = {}
        self._visible_rows: dict[tuple[int, int], RowSubset | None] = {}
        self._orders: dict[tuple[RankGroups, torch.device], list[Tensor]] = {}
        self._merged: dict[RankGroups, tuple[Sequence[Tensor] | None, BlockMasks]] = {}

    @classmethod
    def full(cls, batch: int, rows: int, key_lengths: Sequence[int]) -> BlockMasks:
        """Return masks that hide nothing. All rows are sent to all ranks, even to ranks without keys, so that the bytes
        sent equal the formula."""
        everything = torch.tensor([0, 1]).view(1, 2, 1, 1).expand(-1, -1, batch, rows)
        keys = [HeldKeys(torch.zeros(1, dtype=torch.int64), length) for length in key_lengths]
        masks = cls([everything] * len(keys), keys, prunable=False)
        masks._blocks = dict.fromkeys(itertools.product(range(len(keys)), range(len(keys)), (False,)))
        return masks

    @classmethod
    def of_block(cls, mask: BlockMask) -> BlockMasks:
        """Return the mask of the one block of a group of one, whose keys have the batch of its rows."""
        masks = cls([], [], keys_are_rows=True)
        masks._blocks[0, 0, False] = mask
        return masks

    def block(self, q_shard: int, kv_shard: int, *, pruned: bool = False) -> BlockMask:
        """Return what the rows of a rank attend to among the keys of another; `pruned`: its `visible_rows` only."""
        pruned = pruned and self.visible_rows(q_shard, kv_shard) is not None
        if (q_shard, kv_shard, pruned) not in self._blocks:
            bounds, keys = self.bounds[q_shard], self.keys[kv_shard]
            if pruned:
                rows = self.visible_rows(q_shard, kv_shard)
                assert rows is not None
                bounds = bounds[..., rows.index]
            self._blocks[q_shard, kv_shard, pruned] = _block(keys.local(bounds), keys.count)
        return self._blocks[q_shard, kv_shard, pruned]

    @cached_property
    def prunes(self) -> bool:
        """True if some rank has rows that attend to no key of some other rank, so that `visible_rows` omits rows."""
        pairs = itertools.product(range(len(self.bounds)), range(len(self.keys)))
        return self.prunable and any(i != j and self.visible_rows(i, j) is not None for i, j in pairs)

    def visible_rows(self, q_shard: int, kv_shard: int) -> RowSubset | None:
        """Return the rows of rank `q_shard` that attend to a key of rank `kv_shard` in any batch item; None for all."""
        if not self.prunable:
            return None
        if (q_shard, kv_shard) not in self._visible_rows:
            low, high = self.keys[kv_shard].local(self.bounds[q_shard]).unbind(1)
            visible = (high > low).flatten(0, 1).any(0)
            subset = None if bool(visible.all()) else RowSubset(visible.nonzero().flatten())
            self._visible_rows[q_shard, kv_shard] = subset
        return self._visible_rows[q_shard, kv_shard]

    def visible_fractions(self) -> list[list[float]]:
        """Return [i][j]: the fraction of the pairs of a row of rank i and a key of rank j that are visible."""
        return [[_visible(b, keys) / max(1, b[0, 0].numel() * keys.count) for keys in self.keys] for b in self.bounds]

    @cached_property
    def visible_fraction(self) -> float:
        """The fraction of all pairs of a row and a key that are visible."""
        every = HeldKeys.cat(self.keys, ordered=True)
        pairs = sum(b[0, 0].numel() for b in self.bounds) * every.count
        return sum(_visible(b, every) for b in self.bounds) / max(1, pairs)

    def visible_row_counts(self) -> list[list[int]]:
        """Return [i][j]: how many rows of rank i, of all batch items, attend to any key of rank j."""
        folded, total = self.folded(), self.bounds[0][0, 0].numel()
        subsets = [[folded.visible_rows(i, j) for j in range(len(self.keys))] for i in range(len(self.bounds))]
        return [[total if rows is None else rows.count for rows in of_rank] for of_rank in subsets]

    def folded(self) -> BlockMasks:
        """Return these masks with the batch folded into the rows, item after item: (B, rows) becomes (1, B * rows).

        The frames of all samples are one flat list, so their keys have a batch of 1 while queries have one of B. Rows
        are independent, so the queries of all items can be the rows of one item. Kernels then need one call instead of
        B, and rows are pruned per sample.
        """
        assert not self.keys_are_rows, "the items of a batch do not share keys of text"
        return self if self.bounds[0].shape[2] == 1 else self._folded

    @cached_property
    def _folded(self) -> BlockMasks:
        bounds = [x.flatten(2).unsqueeze(2) for x in self.bounds]
        return BlockMasks(bounds, self.keys, prunable=self.prunable)

    def orders(self, groups: RankGroups, device: torch.device) -> Sequence[Tensor] | None:
        """Return for every group of ranks the order of its rows by their tokens, a permutation of its rows, one rank
        after another. None: the order does not matter, because keys are no rows."""
        if not self.keys_are_rows:
            return None
        if (groups, device) not in self._orders:
            orders = [torch.cat([self.keys[rank].numbers for rank in group]).argsort() for group in groups]
            self._orders[groups, device] = [copy_to_device(order, device) for order in orders]
        return self._orders[groups, device]

    def merged(self, groups: RankGroups, orders: Sequence[Tensor] | None) -> BlockMasks:
        """Return the masks with each group of ranks as one rank, its rows in these orders (None: by rank)."""
        if groups not in self._merged or self._merged[groups][0] is not orders:
            bounds = [torch.cat([self.bounds[rank] for rank in group], dim=-1) for group in groups]
            if orders is not None:
                bounds = [x[..., order.cpu()] for x, order in zip(bounds, orders, strict=True)]
            keys = [HeldKeys.cat([self.keys[rank] for rank in g], ordered=self.keys_are_rows) for g in groups]
            merged = BlockMasks(bounds, keys, prunable=self.prunable, keys_are_rows=self.keys_are_rows)
            self._merged[groups] = orders, merged
        return self._merged[groups][1]


def _block(bounds: Tensor, keys: int) -> BlockMask:
    """Return the mask of a block, given bounds (K, 2, B or 1, rows) of its keys."""
    if bounds.shape[0] > 1:
        some = bounds[:, 1] > bounds[:, 0]
        bounds, some = (x[some.flatten(1).any(1)] for x in (bounds, some))
        counts = some.sum(0)
        most = int(counts.max()) if len(some) else 0
        if most < len(some):  # every row has few of the layers: its first interval goes to the first layer, and so on
            place = torch.where(some, some.cumsum(0) - 1, most).unsqueeze(1).expand_as(bounds)
            bounds = bounds.new_zeros(most + 1, *bounds.shape[1:]).scatter_(0, place, bounds)[:most]
        if keys and most and int((bounds[:, 1] - bounds[:, 0]).sum()) == counts.numel() * keys:
            return None
    return block_mask([Intervals(low, high, keys) for low, high in bounds])


def _visible(bounds: Tensor, keys: HeldKeys) -> int:
    """Return the number of pairs of a row and a key that are visible."""
    low, high = keys.local(bounds).unbind(1)
    return int((high - low).clamp(min=0).sum())


def text_bounds(rows: Tensor, first: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """Return the bounds of causal text: a row at position p attends to the valid positions ``first <= x <= p``.

    Args:
        rows: (s,) the positions of the rows.
        first: (B or 1, s), the first position that a row attends to (sliding window, packed sequences); None: 0.
        valid: (B or 1, positions) bool, False for padding, which no row attends to; None: all.
    """
    low = torch.zeros_like(rows)[None] if first is None else first
    bounds = torch.stack(torch.broadcast_tensors(low, (rows + 1)[None])).unsqueeze(0)
    if valid is None:
        return bounds
    runs = runs_of(valid).unsqueeze(-1)  # (K, 2, B or 1, 1)
    return torch.stack([torch.maximum(bounds[:, 0], runs[:, 0]), torch.minimum(bounds[:, 1], runs[:, 1])], dim=1)


def text_masks(positions: Sequence[Tensor], first: Tensor | None = None, valid: Tensor | None = None) -> BlockMasks:
    """Return the causal masks of text in self-attention, whose rows are all kept for every block, because K and V move.

    Args:
        positions: of the tokens of each rank, ascending.
        first: (B or 1, tokens), see `text_bounds`; of the tokens of all ranks.
        valid: (B or 1, tokens).
    """
    bounds = [text_bounds(rows, None if first is None else first[:, rows], valid) for rows in positions]
    return BlockMasks(bounds, [HeldKeys(rows) for rows in positions], keys_are_rows=True)


def text_mask(rows: Tensor, keys: Tensor, first: Tensor | None = None, valid: Tensor | None = None) -> BlockMask:
    """Return the causal mask of rows at some positions against keys at some positions (k,), ascending.

    The other arguments are those of `text_bounds`.
    """
    return _block(HeldKeys(keys).local(text_bounds(rows, first, valid)), keys.numel())


def decoder_mask(mask: Tensor | None, rows: int, keys: int) -> BlockMask:
    """Return what the last `rows` tokens of a text attend to among its `keys` tokens.

    `mask` is (B or 1, 1, rows, keys) as transformers prepares it, perhaps with more keys, or None for a causal mask
    without padding.
    """
    if mask is None:
        return _block(text_bounds(torch.arange(keys - rows, keys)), keys)
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise MaskError(
            f"attention_mask: expected (B, 1, rows, keys) as transformers prepares it, got {tuple(mask.shape)}"
        )
    visible = mask[:, 0, :, :keys]
    return _block(runs_of((visible if visible.dtype is torch.bool else visible >= 0).cpu()), keys)
