"""The text K and V of a prompt that was prefilled with sharded text: they stay sharded while decoding.

Each rank keeps the K and V of its shard of the prompt. K and V of each new token are stored on one rank, in turn, so
that all caches grow alike, unless the prompt's sharding names one rank for all of them (`star`). The queries of a
decoding step are the same on every rank and attend to each shard (Star Attention's phase 2, arXiv 2411.17116); the
partial results are merged exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mllm_seqpar.masks import Rectangle
from mllm_seqpar.masks.causal import causal_rectangles

from .text_shards import TextShards


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

    def rectangles(
        self, rows: int, valid: Tensor | None, batch: int, window: int | None = None
    ) -> tuple[Rectangle, ...]:
        """Return the mask rectangles of the newest tokens against the tokens whose K and V this rank keeps.

        Args:
            rows: the number of newest tokens, which are the queries and in the cache already.
            valid: (B, all tokens) or None: tokens that may be attended to at all (the attention mask).
            batch: B.
            window: the number of keys that a token attends to at most, itself included.
        """
        positions = torch.arange(self.total - rows, self.total)
        first = None if window is None else (positions - window + 1)[None]
        kept = None if valid is None else valid.detach().bool().cpu()[:, self.positions]
        return causal_rectangles(batch, positions, self.positions, first, kept)
