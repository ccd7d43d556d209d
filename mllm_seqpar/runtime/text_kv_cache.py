"""The text K and V of a prompt that was read with its tokens dealt to the ranks: they stay dealt while decoding.

Each rank keeps those of its own share of the prompt; every new token's go to one rank: in turn, so that no rank's part
grows faster than another's, or always the same where the prompt's layout says so (`star`). A decoding step's queries
are the same on every rank and attend to each part (query broadcast, Star Attention's phase 2, arXiv 2411.17116); the
partial results are merged exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mllm_seqpar.masks import Rectangle
from mllm_seqpar.masks.intervals import interval_rectangles

from .text_shards import TextShards


class TextKVCache:
    """Where the tokens stand whose K and V this rank keeps; one object for all layers of a cache.

    Attributes:
        positions: (k,) int64 on the CPU, ascending: the kept tokens' places in the whole text.
        total: tokens of all ranks.
        fresh: (f,) int64: those of the pass under way that this rank keeps, by their place in the pass.
    """

    def __init__(self, text: TextShards) -> None:
        self.fresh = text.own
        self.positions = text.positions(text.comm.rank)[self.fresh]
        self.total = text.length
        self._rank, self._size, self._keeper = text.comm.rank, text.comm.size, text.keeper

    def extend(self, count: int) -> None:
        """Begins a pass of `count` new tokens."""
        new = torch.arange(self.total, self.total + count)
        home = new % self._size if self._keeper is None else torch.full_like(new, self._keeper)
        self.fresh = (home == self._rank).nonzero().flatten()
        self.positions = torch.cat([self.positions, new[self.fresh]])
        self.total += count

    def crop(self, total: int) -> None:
        """Forgets the tokens from `total` on."""
        self.positions = self.positions[self.positions < total]
        self.total = min(self.total, total)


class CachedTextMask:
    """The newest tokens of a text as queries, against the K and V that this rank keeps of the whole text.

    Args:
        text: the kept tokens, the newest ones among them.
        rows: how many the newest are.
        valid: (B, all tokens) or None: tokens that may be seen at all (the attention mask).
    """

    def __init__(self, text: TextKVCache, rows: int, valid: Tensor | None) -> None:
        self._positions, self._first = text.positions, text.total - rows
        self._rows = torch.arange(self._first, text.total)
        self._valid = None if valid is None else valid.detach().bool().cpu()[:, self._positions]
        self._tiles: dict[tuple[int, int | None], tuple[Rectangle, ...]] = {}

    def tiles(self, batch: int, window: int | None = None) -> tuple[Rectangle, ...]:
        """What the rows see; with `window`, that many keys at most, itself included. Planned once for all layers."""
        if (batch, window) not in self._tiles:
            high = torch.searchsorted(self._positions, self._rows, right=True)
            low = torch.zeros_like(high)
            if window is not None:
                low = torch.searchsorted(self._positions, self._rows - window + 1)
            valid = None if self._valid is None else self._valid.expand(batch, -1)
            self._tiles[batch, window] = interval_rectangles(
                low.expand(batch, -1), high.expand(batch, -1), self._positions.numel(), 1, valid
            )
        return self._tiles[batch, window]
