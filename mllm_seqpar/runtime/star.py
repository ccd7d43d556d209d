"""Star Attention (arXiv 2411.17116): how a long prompt is cut, who reads what of it, and what its rows see.

    prompt  =  c_1 | c_2 | ... | c_n | query          n blocks of b tokens for n ranks, and what remains

Phase 1 (section 2.1): rank i reads (c_1, c_i), each token at its own position, and attends to nothing else: c_1, the
anchor, takes the attention that every text gives to its beginning, which the blocks' own beginnings would get without
it. No K or V travels. The rank keeps the K and V of c_i alone. The first rank reads c_1 and as many rows of padding,
which see nothing and are kept nowhere, so that all ranks have equally many rows for the cross-attention.

Phase 2 (section 2.2): the query, and every token that is generated, is on all ranks and attends to everything before
it; the ranks' partial results are merged exactly (`cached_text`). K and V of those tokens are kept by the last rank.

So a context token misses what lies between the anchor and its own block: this is the one approximate thing in this
library. Where nothing lies between, with one or two ranks, it is exact.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.masks import CausalBlockMasks
from mllm_seqpar.sharding import unshard_sequence

from .text_shards import TextShards

QUERY_TOKENS = 256
"""A question and what may follow it; long prompts leave at least so many to phase 2."""
QUERY_SHARE = 16
"""Of shorter prompts this part: phase 2 is computed on every rank, and should stay small beside a block."""


def block_length(length: int, size: int) -> int:
    """b, tokens of each of `size` blocks of a prompt; 0 where there are too few to cut it.

    The query is what the blocks leave: the last 256 tokens, or a sixteenth of a prompt below 4096 (one at least), and
    up to `size` - 1 more, so that the blocks are equal.
    """
    query = min(QUERY_TOKENS, max(1, length // QUERY_SHARE))
    return max(0, length - query) // size


class StarText(TextShards):
    """The context of a prompt as phase 1 reads it: 2 b rows on every rank, the anchor's first.

    `pad` and `shard` take the whole prompt (..., L, ...) and leave the query out; `length` and what `unshard` gives are
    of the context, n b tokens.

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
        self.keeper = comm.size - 1  # the paper's query host
        self.padded = context + comm.size  # the first column of padding is what the first rank's second half is made of

    @property
    def local(self) -> int:
        """2 b."""
        return 2 * self.block

    def positions(self, rank: int) -> Tensor:
        """(2 b,) int64: the anchor, then the rank's own block, or the first place after the context, b times."""
        own = torch.arange(rank * self.block, (rank + 1) * self.block)
        return torch.cat([torch.arange(self.block), own if rank else torch.full_like(own, self.length)])

    @cached_property
    def own(self) -> Tensor:
        """(b,) int64: the rows of the rank's own block."""
        start = self.block if self.comm.rank else 0
        return torch.arange(start, start + self.block)

    def pad(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """(..., L, ...), or the context alone -> (..., P, ...)."""
        return super().pad(x.narrow(dim, 0, self.length), dim, fill)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's (..., 2 b, ...) -> the context's (..., n b, ...) on every rank, from each rank's own block."""
        return unshard_sequence(x.index_select(dim, self.own.to(x.device)), dim, self.comm, self.layout)

    def _blocks_of(self, first: Tensor | None, valid: Tensor | None) -> CausalBlockMasks:
        return StarBlockMasks(self, first, valid)


class StarBlockMasks(CausalBlockMasks):
    """Each rank's rows and its own keys, causally: the blocks (i, i), and there are no others (tile (1, 1))."""

    def __init__(self, text: StarText, first: Tensor | None, valid: Tensor | None) -> None:
        nothing = torch.full((1, text.padded), text.padded)  # where padding begins to see: after everything
        first = torch.zeros_like(nothing) if first is None else first.clone()
        first[:, text.length :] = nothing[:, text.length :]
        super().__init__(text.batch, text.padded, text.comm.size, text.layout, first, valid)
        self.positions = [text.positions(rank) for rank in range(text.comm.size)]
