"""Star Attention (arXiv 2411.17116): how a long prompt is split into blocks, and which keys its tokens attend to.

    prompt  =  c_1 | c_2 | ... | c_n | query          n blocks of b tokens for n ranks, and the remainder

Phase 1 (section 2.1): rank i reads (c_1, c_i), each token at its own position, and attends to nothing else. c_1 is the
anchor: it absorbs the attention that every text pays to its first tokens, and which the first tokens of each block
would receive otherwise. No K or V is sent. The rank keeps the K and V of c_i alone. The first rank reads c_1 and
the same number of rows of padding, which attend to nothing and are not kept, so that all ranks have the same number of
rows in cross-attention.

Phase 2 (section 2.2): the query and every generated token are on all ranks and attend to everything before them; the
partial results of the ranks are merged exactly (`merge_over_ranks`). The last rank keeps the K and V of these tokens.

A token of the context does not attend to the keys between the anchor and its own block, which makes this the only
approximate algorithm of the library. With one or two ranks there are no such keys, and it is exact.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import MaskError
from mllm_seqpar.sharding import gather_sequence

from .text import TextShards

QUERY_TOKENS = 256
"""The number of tokens that a long prompt leaves to phase 2 at least: a question and what may follow it."""
QUERY_SHARE = 16
"""In a shorter prompt, one token in this many is in the query. Every rank computes the query, so it must be short."""


def block_length(length: int, size: int) -> int:
    """Return b, the number of tokens of each of `size` blocks of a prompt; 0 if the prompt is too short to be split.

    The query consists of the tokens after the blocks: the last 256 tokens, or a sixteenth of a prompt below 4096 (at
    least one), and up to `size` - 1 more, so that the blocks are equal.
    """
    query = min(QUERY_TOKENS, max(1, length // QUERY_SHARE))
    return max(0, length - query) // size


class StarText(TextShards):
    """The context of a prompt as phase 1 reads it: 2 b rows on every rank, the anchor first.

    `pad` and `shard` take the whole prompt (..., L, ...) and leave out the query; `length` and the result of `unshard`
    are those of the context, n b tokens.

    Args:
        batch, length: B and L, of the whole prompt.
        comm: the group, at most L - 1 ranks.
        valid, first: as for `TextShards`, of the whole prompt.
    """

    def __init__(
        self, batch: int, length: int, comm: Communicator, valid: Tensor | None = None, first: Tensor | None = None
    ) -> None:
        self.block = block_length(length, comm.size)
        context = self.block * comm.size
        valid, first = (None if x is None else x[:, :context] for x in (valid, first))
        super().__init__(batch, context, comm, "contiguous", valid, first)
        self.new_token_rank = comm.size - 1  # the paper's query host
        self.local = 2 * self.block
        self.padded = context + comm.size  # the first column of padding fills the second half of the first rank's rows

    def require_text_in_anchor(self) -> None:
        """Raise MaskError for samples that are all padding in the anchor."""
        if self.valid is not None:
            without_text = (~self.valid[:, : self.block].any(1)).nonzero().flatten().tolist()
            if without_text:
                raise MaskError(
                    f"attention_mask: sample {without_text[0]} has padding only among its first {self.block} tokens, "
                    'which are the anchor of self_attention="star" and must be text; pass samples of about one length, '
                    "or one by one"
                )

    def positions(self, rank: int) -> Tensor:
        """(2 b,) int64: the anchor, then the rank's own block; on the first rank, b times the first padding column."""
        own = torch.arange(rank * self.block, (rank + 1) * self.block)
        return torch.cat([torch.arange(self.block), own if rank else torch.full_like(own, self.length)])

    @cached_property
    def own(self) -> slice:
        """The rows of the rank's own block."""
        start = self.block if self.comm.rank else 0
        return slice(start, start + self.block)

    def shard(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """(..., L, ...), the same on every rank -> this rank's (..., 2 b, ...), padded with `fill`."""
        x, block = self.pad(x, dim, fill), self.block
        padding = x.narrow(dim, self.length, 1)
        own = x.narrow(dim, self.comm.rank * block, block) if self.comm.rank else torch.cat([padding] * block, dim)
        return torch.cat([x.narrow(dim, 0, block), own], dim)

    def pad(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """(..., L, ...), or the context alone -> (..., P, ...)."""
        return super().pad(x.narrow(dim, 0, self.length), dim, fill)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's (..., 2 b, ...) -> the context's (..., n b, ...) on every rank, from each rank's own block."""
        return gather_sequence(x.narrow(dim, self.own.start, self.block), dim, self.comm, self.layout)

    def _first_keys(self, window: int | None) -> Tensor:
        """Return the first key that each row attends to; that of padding is beyond the end, where there is none."""
        causal = super()._first_keys(window)
        first = torch.zeros(1, self.padded, dtype=torch.int64) if causal is None else causal.clone()
        first[:, self.length :] = self.padded
        return first
