"""The mask of an attention block: one interval of keys for each row, in the order in which a rank holds them.

Frames and tokens of a rank are in ascending order in every layout. Causal text, sliding windows, packed sequences,
padding, and "the frames before me" therefore show a row one interval ``low <= j < high`` of the keys of any rank. A
table with holes is a few such layers: the k-th run of every row. Layers are disjoint, so their results merge by the
log-sum-exp, as those of ranks do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device

Span = tuple[int, int]
"""A half-open range (start, stop)."""


class Intervals:
    """Row s of item b attends to the keys ``low[b, s] <= j < high[b, s]`` of a block. It never changes.

    It is made once for all layers of a pass, on the CPU, and copied to a device once. Blocks of which every row attends
    to every key have no intervals (None), so kernels get intervals only where something is hidden.

    Args:
        low, high: (B or 1, S) integers on the CPU; they may exceed the range of the keys.
        keys: the number of keys of the block, T.

    Attributes:
        low, high: int32, contiguous, in 0 to `keys`; both are 0 for a row that attends to nothing. They have one item
            if all items are equal.
        visible: the number of visible entries (row, key) of the items that `low` has, for one head.
        is_full: whether every row attends to every key.
        kept: what kernels have derived from the intervals, for all layers, by keys of their own.
        layers: set by `joined`: `low` and `high` are only the hull of what these layers make visible.
    """

    layers: tuple[Intervals, ...] = ()

    def __init__(self, low: Tensor, high: Tensor, keys: int) -> None:
        both = torch.stack([low, high]).clamp_(0, keys).to(torch.int32)
        both *= both[1] > both[0]
        if both.shape[1] > 1 and bool((both == both[:, :1]).all()):
            both = both[:, :1].contiguous()
        self.low, self.high = both.unbind()
        self.keys = keys
        self.visible = int((self.high - self.low).sum())
        self.is_full = self.visible == self.low.numel() * keys
        self.kept: dict[Hashable, Any] = {}
        self._both = both

    @classmethod
    def causal(cls, length: int) -> Intervals:
        """Return the causal square: row i attends to keys 0 to i."""
        row = torch.arange(length)[None]
        return cls(torch.zeros_like(row), row + 1, length)

    @classmethod
    def joined(cls, layers: Sequence[Intervals]) -> Intervals:
        """Return disjoint layers of a block as one, for kernels that expand a mask anyway."""
        lows = [torch.where(layer.high > layer.low, layer.low, layer.keys) for layer in layers]
        low = torch.stack(torch.broadcast_tensors(*lows)).amin(0)
        high = torch.stack(torch.broadcast_tensors(*[layer.high for layer in layers])).amax(0)
        hull = cls(low, high, layers[0].keys)
        hull.layers, items = tuple(layers), low.shape[0]
        hull.visible = sum(layer.visible * items // layer.low.shape[0] for layer in layers)
        hull.is_full = hull.visible == low.numel() * hull.keys
        hull.is_causal = False
        return hull

    def __repr__(self) -> str:
        items, rows = self.low.shape
        return f"Intervals({items} x {rows} rows, {self.keys} keys, {self.visible} visible)"

    @cached_property
    def is_causal(self) -> bool:
        """Whether the block is a causal square: as many rows as keys, row i attends to keys 0 to i."""
        items, rows = self.low.shape
        if rows != self.keys or items > 1 or self.visible != rows * (rows + 1) // 2 or bool(self.low.any()):
            return False
        return torch.equal(self.high[0], torch.arange(1, rows + 1, dtype=torch.int32))

    @cached_property
    def span(self) -> Span:
        """The keys from the first that any row attends to, to the last; (0, 0) if all rows attend to nothing."""
        some = self.high > self.low
        if not bool(some.any()):
            return 0, 0
        return int(torch.where(some, self.low, self.keys).min()), int(self.high.max())

    @property
    def runs_of_rows(self) -> int:
        """The number of runs of rows that attend to the same keys."""
        changes = (self.low.diff(dim=1) != 0) | (self.high.diff(dim=1) != 0)
        return int(changes.sum()) + self.low.shape[0]

    def narrowed(self) -> tuple[Intervals | None, slice, slice]:
        """Return the rows and the keys between which everything visible is, and the intervals of these rows and keys
        (None: all of it is visible)."""
        some = (self.high > self.low).any(0).nonzero()
        rows, keys = slice(int(some[0]), int(some[-1]) + 1), self.span
        whole = rows == slice(0, self.low.shape[1]) and keys == (0, self.keys)
        part = self if whole else self.part(rows, keys)
        return None if part.is_full else part, rows, slice(*keys)

    @cached_property
    def common(self) -> slice | None:
        """The keys that every row attends to, if no row attends to others; else None."""
        first, stop = self.span
        whole = self.visible == self.low.numel() * (stop - first)
        return slice(first, stop) if whole and stop > first else None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `low` and `high` on `device`, where they are copied once for all layers."""
        if device not in self.kept:
            self.kept[device] = copy_to_device(self._both, device).unbind()
        return self.kept[device]

    def expand(self, device: torch.device, batch: slice, rows: slice, keys: slice) -> Tensor:
        """Return the mask (items, rows, keys) bool of a part of the block, True where visible; `keys` has both ends."""
        if self.layers:  # where more intervals have begun than ended
            width, items = keys.stop - keys.start, max(layer.low.shape[0] for layer in self.layers)
            edges = torch.zeros(items, self.low[:, rows].shape[1], width + 1, dtype=torch.int8)
            for layer in self.layers:
                for bound, step in ((layer.low, 1), (layer.high, -1)):
                    place = (bound[:, rows].long() - keys.start).clamp_(0, width).expand(items, -1).unsqueeze(-1)
                    edges.scatter_add_(-1, place, edges.new_tensor(step).expand_as(place))
            return (edges.cumsum(-1, dtype=torch.int8)[..., :width] > 0).to(device)
        low, high = (x[batch, rows].unsqueeze(-1) for x in self.on(device))
        key = torch.arange(keys.start, keys.stop, device=device, dtype=low.dtype)
        return (key >= low) & (key < high)

    def part(self, rows: slice = slice(None), keys: Span | None = None) -> Intervals:
        """Return the intervals of some rows, of which the keys from ``keys[0]`` to ``keys[1]`` are the block."""
        if self.layers:
            return Intervals.joined([layer.part(rows, keys) for layer in self.layers])
        first, stop = (0, self.keys) if keys is None else keys
        return Intervals(self.low[:, rows] - first, self.high[:, rows] - first, stop - first)


BlockMask = tuple[Intervals, ...] | None
"""What the rows of a block attend to: None, everything; else layers, none of them empty; () is nothing."""


def block_mask(layers: Iterator[Intervals] | list[Intervals]) -> BlockMask:
    """Return the mask of a block that consists of disjoint layers: without empty ones, and None if all is visible."""
    some = tuple([layer for layer in layers if layer.visible])
    return None if len(some) == 1 and some[0].is_full else some


def part_of_mask(mask: BlockMask, rows: slice = slice(None), keys: Span | None = None) -> BlockMask:
    """Return the mask of some rows and a range of the keys of a block; see `Intervals.part`."""
    return None if mask is None else block_mask([layer.part(rows, keys) for layer in mask])


def runs_of(visible: Tensor) -> Tensor:
    """Return the runs of True in the last dim of a table (..., n) as bounds (K, 2, ...): the k-th run is ``first <= i <
    stop``; both are 0 in rows with fewer runs. K is at least 1."""
    flat = visible.flatten(0, -2) if visible.dim() > 1 else visible[None]
    # Whether entry i differs from entry i - 1, where those before the first and after the last are False. Whole words
    # are looked through first, since few of them are not 0.
    length = flat.shape[1]
    change = torch.zeros(flat.shape[0], (length + 8) // 8 * 8, dtype=torch.bool)
    change[:, :length] = flat
    change[:, 1 : length + 1] ^= flat
    words = change.view(torch.int64).flatten().nonzero().flatten()
    word, byte = change.view(-1, 8)[words].nonzero().unbind(1)
    edges = words[word] * 8 + byte  # of every row first, stop, first, stop ...
    row, first, stop = edges[::2] // change.shape[1], edges[::2] % change.shape[1], edges[1::2] % change.shape[1]
    counts = torch.bincount(row, minlength=flat.shape[0])
    number = torch.arange(row.numel()) - (counts.cumsum(0) - counts)[row]
    bounds = torch.zeros(max(1, int(counts.max()) if counts.numel() else 0), 2, flat.shape[0], dtype=torch.int64)
    bounds[number, 0, row], bounds[number, 1, row] = first, stop
    return bounds.view(*bounds.shape[:2], *visible.shape[:-1])
