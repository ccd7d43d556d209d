"""The text of forward passes: padding, sharding, the inverse of both, causal masks, and its K and V.

The text K and V of a prompt that was prefilled with sharded text stay sharded while decoding (`TextKVCache`): each rank
keeps those of its shard of the prompt. K and V of each new token are stored on one rank, in turn, so that all caches
grow alike, unless the prompt's sharding names one rank for all of them (`star`). The queries of a decoding step are the
same on every rank and attend to each shard (Star Attention's phase 2, arXiv 2411.17116); the partial results are merged
exactly.

Shape legend: B samples, L tokens of the caller, P tokens after padding to what the layout needs, s = P / n per rank.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.comm import Communicator
from mllm_seqpar.masks import BlockMask, BlockMasks
from mllm_seqpar.masks.block_masks import text_mask, text_masks
from mllm_seqpar.sharding import gather_sequence, padded_length, sequence_positions, take_slices, token_slices


class TextShards:
    """How the (B, L) tokens of one forward pass are sharded over a group.

    Args:
        batch, length: B and L.
        comm, layout: the group, and how token positions map to its ranks.
        valid: (B, L) bool or None: keys that may be attended to (the attention mask). It and `first` are copied to the
            CPU, where masks are planned.
        first: (B or 1, L) int64 or None: the first key each row may attend to (packed sequences).

    Attributes:
        local: s, the number of tokens on each rank, padding included.
        valid: (B, L) bool on the CPU; None if all tokens may be attended to.
        is_plain: whether the text is one causal sequence for each sample, without padding of the caller.
        new_token_rank: the rank that keeps K and V of all tokens after this text; None: the ranks take turns.
    """

    new_token_rank: int | None = None

    def __init__(
        self,
        batch: int,
        length: int,
        comm: Communicator,
        layout: str,
        valid: Tensor | None = None,
        first: Tensor | None = None,
    ) -> None:
        self.batch, self.length, self.comm, self.layout = batch, length, comm, layout
        self.padded = padded_length(length, comm.size, layout)
        self.local = self.padded // comm.size
        self._slices = token_slices(self.padded, comm.rank, comm.size, layout)
        valid = None if valid is None else valid.cpu().bool()
        self.valid = None if valid is None or bool(valid.all()) else valid
        self._first = None if first is None else first.long().cpu()
        self.is_plain = self.valid is None and self._first is None
        self._blocks: dict[int | None, BlockMasks] = {}

    def positions(self, rank: int) -> Tensor:
        """Return the positions of the tokens of `rank` in the padded text, (s,) int64 on the CPU."""
        return sequence_positions(self.padded, rank, self.comm.size, self.layout)

    @cached_property
    def _local_positions(self) -> Tensor:
        return self.positions(self.comm.rank)

    @cached_property
    def own(self) -> slice:
        """This rank's rows that are tokens of its shard and not padding, which is behind them."""
        return slice(0, int(torch.searchsorted(self._local_positions, self.length)))

    def shard(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """(..., L, ...), the same on every rank -> this rank's (..., s, ...), padded with `fill`. Differentiable."""
        x = self.pad(x, dim, fill)
        return x if self.comm.size == 1 else take_slices(x, dim, self._slices)

    def pad(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """(..., L, ...) -> (..., P, ...)."""
        missing = self.padded - x.shape[dim]
        after = x.dim() - 1 - dim % x.dim()
        return F.pad(x, (0, 0) * after + (0, missing), value=fill) if missing else x

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's (..., s, ...) -> (..., L, ...) on every rank, without padding. Differentiable."""
        return gather_sequence(x, dim, self.comm, self.layout).narrow(dim, 0, self.length)

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """This rank's (B, s, C) -> the rows with these positions, (B, r, C) on every rank. Not differentiable."""
        place = torch.full((self.padded,), -1)
        place[self._local_positions[self.own]] = torch.arange(self.local)[self.own]
        local = place[rows.cpu()]
        out = x.new_zeros((x.shape[0], rows.numel(), *x.shape[2:]))
        here = (local >= 0).nonzero().flatten()
        targets, sources = copy_to_device(torch.stack([here, local[here]]), x.device)
        out[:, targets] = x[:, sources].detach()
        return out if self.comm.size == 1 else self.comm.all_reduce(out, "hidden")

    def blocks(self, window: int | None = None) -> BlockMasks:
        """Return the causal masks; `window` is the number of keys a row attends to at most, itself included."""
        if window not in self._blocks:
            positions = [self.positions(rank) for rank in range(self.comm.size)]
            # Padding added here is at the end, where no token attends to it, so it needs no mask.
            self._blocks[window] = text_masks(positions, self._first_keys(window), self.valid)
        return self._blocks[window]

    def local_mask(self, window: int | None = None) -> BlockMask:
        """Return the causal mask of this rank's rows against all tokens, which every rank has."""
        first, rows = self._first_keys(window), self._local_positions
        first = None if first is None else first[:, rows]
        return text_mask(rows, torch.arange(self.length), first, self.valid)

    def _first_keys(self, window: int | None) -> Tensor | None:
        """Return the first key that each row attends to, (B or 1, P)."""
        first = self._first
        if window is not None:
            edge = (torch.arange(self.length) - window + 1).clamp(min=0)[None]
            first = edge if first is None else torch.maximum(first, edge)
        return None if first is None else self.pad(first, 1)


class Rows(NamedTuple):
    """The rows of text that a part of a pass computes.

    Attributes:
        start, stop: the tokens of the pass.
        text: how they are sharded; None: every rank computes all of them, over the K and V in a cache.
    """

    start: int
    stop: int
    text: TextShards | None = None


def select_logit_rows(x: Tensor, wanted: int | Tensor) -> Tensor:
    """Return the rows that `logits_to_keep` selects, as transformers 5.23 reads it.

    Args:
        x: (B, L, C).
        wanted: a number of last rows (0: all); (r,) indices or (L,) bool for all samples; (B, r) indices of each
            sample; or (B, L) bool.

    Returns:
        (B, r, C); for (B, L) bool (r, C), the rows of all samples one after another.
    """
    if isinstance(wanted, int):
        return x[:, slice(-wanted, None)]
    wanted = wanted.to(x.device)
    if wanted.dim() < 2:
        return x[:, wanted]
    return x[wanted] if wanted.dtype is torch.bool else x.take_along_dim(wanted[..., None], dim=1)


def requested_rows(text: TextShards, wanted: int | Tensor, local: Tensor, query: Tensor | None = None) -> Tensor:
    """Return, on every rank, the hidden states of the rows that `logits_to_keep` selects; see `select_logit_rows`.

    Args:
        text: the sharding of the first rows.
        wanted: the rows of the whole text.
        local: (B, s, C), the shard of the first rows.
        query: (B, r, C), the rows after them, on every rank; None if there are none.
    """
    every_row = isinstance(wanted, int) and wanted == 0
    if every_row or (isinstance(wanted, Tensor) and wanted.dim() == 2):
        whole = text.unshard(local, 1)
        return select_logit_rows(whole if query is None else torch.cat([whole, query], dim=1), wanted)
    length = text.length + (0 if query is None else query.shape[1])
    rows = select_logit_rows(torch.arange(length)[None], wanted)[0]
    sharded = rows < text.length
    if query is None or bool(sharded.all()):
        return text.gather_rows(local, rows)
    out = query[:, (rows - text.length).clamp(min=0).to(query.device)]
    if bool(sharded.any()):
        out[:, sharded.to(out.device)] = text.gather_rows(local, rows[sharded])
    return out


def packed_starts(position_ids: Tensor) -> Tensor | None:
    """(B or 1, L) positions -> (B or 1, L) the index at which each token's sequence starts, or None for one sequence.

    A new sequence starts where position_ids are not consecutive, as in transformers without an attention mask.
    """
    positions = position_ids.long().cpu()
    if positions.shape[-1] < 2:
        return None
    starts = torch.zeros_like(positions)
    starts[:, 1:] = torch.where(positions.diff(dim=-1) != 1, torch.arange(1, positions.shape[-1]), 0)
    return starts.cummax(dim=-1).values if bool(starts.any()) else None


class TextKVCache:
    """The positions of the tokens whose K and V this rank keeps; one object for all layers of a cache.

    Attributes:
        positions: (k,) int64 on the CPU, ascending: the positions in the whole text.
        total: the number of tokens on all ranks.
        fresh: the tokens of the current pass that this rank keeps, by their index in the pass.
    """

    def __init__(self, text: TextShards) -> None:
        self.fresh = text.own
        self.positions = text.positions(text.comm.rank)[self.fresh]
        self.total = text.length
        self._rank, self._size, self._keeper = text.comm.rank, text.comm.size, text.new_token_rank

    def extend(self, count: int) -> None:
        """Begin a pass of `count` new tokens."""
        if self._keeper is None:
            self.fresh = slice((self._rank - self.total) % self._size, count, self._size)
        else:
            self.fresh = slice(0, count if self._keeper == self._rank else 0)
        new = torch.arange(self.total, self.total + count)
        self.positions = torch.cat([self.positions, new[self.fresh]])
        self.total += count

    def crop(self, total: int) -> None:
        """Drop the tokens from `total` on."""
        self.positions = self.positions[self.positions < total]
        self.total = min(self.total, total)

    def mask(self, rows: int, valid: Tensor | None, window: int | None = None) -> BlockMask:
        """Return the mask of the newest tokens against the tokens whose K and V this rank keeps.

        Args:
            rows: the number of newest tokens, which are the queries and in the cache already.
            valid: (B, all tokens) or None: tokens that may be attended to at all (the attention mask).
            window: the number of keys that a token attends to at most, itself included.
        """
        positions = torch.arange(self.total - rows, self.total)
        first = None if window is None else (positions - window + 1)[None]
        return text_mask(positions, self.positions, first, None if valid is None else valid.detach().bool().cpu())
