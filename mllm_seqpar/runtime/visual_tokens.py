"""Embeddings of visual tokens that take the place of text tokens: from the rank that encoded them to the rank that has
the text row.

In a decoder-only model the text has a placeholder for each visual token. The embeddings are sharded by frames, because
each rank encodes its own, and the text is sharded by the layout of the text. One all-to-all takes every embedding to
the ranks that compute its row. Token ids and the sizes of images say on every rank which rank sends how much to
which, so nothing but embeddings travels, and no rank holds the embeddings of all frames unless it has all text rows.

Shape legend: N visual tokens of the text, x of them encoded by this rank, m in its text rows; s text rows of a sample
on this rank; W width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.base import Recv, Send

from .attention_record import FrameTokens

LABEL = "visual tokens"


@dataclass(frozen=True)
class TokenPlaces:
    """Where the visual tokens of a text are, and which embedding each of them has; on the CPU.

    Attributes:
        samples, positions: (N,) int64, the sample and the position in the text of each visual token, ascending.
        embeddings: (N,) int64, the number of its embedding, in the order in which frames are sharded. Beams of one
            sample share embeddings.
        frames: (N,) int64, the number of the frame that it is of.
        bounds: (n + 1,) int64: rank r encodes the embeddings from ``bounds[r]`` to ``bounds[r + 1]``.
    """

    samples: Tensor
    positions: Tensor
    embeddings: Tensor
    frames: Tensor
    bounds: Tensor

    def between(self, start: int, stop: int) -> TokenPlaces:
        """Return the visual tokens at the positions ``start <= l < stop``, counted from `start`."""
        kept = ((self.positions >= start) & (self.positions < stop)).nonzero().flatten()
        rows = self.samples[kept], self.positions[kept] - start, self.embeddings[kept], self.frames[kept]
        return TokenPlaces(*rows, self.bounds)

    @property
    def tokens(self) -> FrameTokens:
        """Return which tokens are of which frame."""
        return FrameTokens(self.samples, self.positions, self.frames, int(self.frames.max()) + 1)

    def routes(self, rows: Sequence[Tensor], rank: int) -> TokenRoutes:
        """Return what this rank sends and receives.

        Args:
            rows: for each rank, the positions (s,) of the text tokens that it computes, in its order. A position may be
                on several ranks.
            rank: this rank.
        """
        first, stop = int(self.bounds[rank]), int(self.bounds[rank + 1])
        own = ((self.embeddings >= first) & (self.embeddings < stop)).nonzero().flatten()
        own_positions, own_embeddings = self.positions[own], self.embeddings[own] - first
        extent = 1 + max((int(x.max()) for x in (self.positions, *rows) if x.numel()), default=0)
        sends: list[Tensor] = []
        for owner, positions in enumerate(rows):
            place = torch.full((extent,), -1).index_copy(0, positions, torch.arange(positions.numel()))
            sends.append(own_embeddings[place[own_positions] >= 0])
            if owner == rank:
                local = place[self.positions]
        here = (local >= 0).nonzero().flatten()
        source = torch.searchsorted(self.bounds[1:].contiguous(), self.embeddings[here], right=True)
        order = source.argsort(stable=True)  # received rank by rank, each in the order of the text
        index = self.samples[here] * rows[rank].numel() + local[here]
        return TokenRoutes(sends, source.bincount(minlength=len(rows)).tolist(), index[order])


@dataclass(frozen=True)
class TokenRoutes:
    """One rank's part of the exchange of embeddings; on the CPU.

    Attributes:
        sends: for each rank, the embeddings that it gets, as indices into those of this rank.
        receives: the number of embeddings that this rank gets from each rank.
        index: (m,) int64, the row of the flattened (B, s) rows that each received embedding belongs to.
    """

    sends: Sequence[Tensor]
    receives: Sequence[int]
    index: Tensor

    def exchange(self, embeddings: Tensor, comm: Communicator) -> VisualTokens:
        """This rank's embeddings (x, W) -> the embeddings (m, W) of its rows, in the order of the rows."""
        device = embeddings.device
        sends = list(copy_to_device(torch.cat(list(self.sends)), device).split([x.numel() for x in self.sends]))
        index, order = self.index.sort()
        order = copy_to_device(order, device)
        found: Tensor = _ExchangeRows.apply(embeddings, comm, sends, self.receives, order)
        return VisualTokens(found, copy_to_device(index, device))


@dataclass(frozen=True)
class VisualTokens:
    """The embeddings (m, W) of this rank's visual tokens, and their rows in the flattened (B, s), ascending."""

    embeddings: Tensor
    index: Tensor

    def chunk(self, count: int) -> list[VisualTokens]:
        """Split each embedding into `count` of width W / count, for the layers that add one each."""
        return [VisualTokens(part, self.index) for part in self.embeddings.chunk(count, -1)]

    def replace_rows(self, rows: Tensor) -> Tensor:
        """(B, s, W) -> (B, s, W) with the embeddings in the rows of visual tokens."""
        return rows.flatten(0, 1).index_copy(0, self.index, self.embeddings.to(rows.dtype)).view_as(rows)

    def mask(self, batch: int, rows: int) -> Tensor:
        """Return (B, s) bool: which rows are visual tokens."""
        found = torch.zeros(batch * rows, dtype=torch.bool, device=self.index.device)
        return found.index_fill_(0, self.index, True).view(batch, rows)


class _ExchangeRows(torch.autograd.Function):
    """Local shapes: x (x, W) -> (m, W). Rank r sends ``x[sends[p]]`` to each rank p, and receives likewise.

    Forward: out = concat over ranks p of their ``x_p[sends_p[r]]``, in the order `order`.
    Backward: dx = sum over ranks p of what they received from this rank, row by row; the gradient of the SUM of the
    losses of all ranks. Each rank sends (x - its own rows) W elements in forward and (m - its own rows) W in backward.
    Nothing is saved but indices.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, sends: Sequence[Tensor], receives: Sequence[int], order: Tensor
    ) -> Tensor:
        ctx.comm, ctx.sends, ctx.receives, ctx.order, ctx.rows = comm, sends, receives, order, x.shape[0]
        packed = x.detach().index_select(0, torch.cat(list(sends)))
        return _all_to_all(packed, [s.numel() for s in sends], receives, comm).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts = [s.numel() for s in ctx.sends]
        packed = torch.empty_like(grad, memory_format=torch.contiguous_format).index_copy_(0, ctx.order, grad)
        parts = _all_to_all(packed, ctx.receives, counts, ctx.comm).split(counts)
        wide = torch.promote_types(grad.dtype, torch.float32)
        dx = grad.new_zeros((ctx.rows, grad.shape[1]), dtype=wide)
        for index, part in zip(
            ctx.sends, parts, strict=True
        ):  # rank by rank, so that the bits are the same in each run
            dx.index_add_(0, index, part.to(wide))
        return dx.to(grad.dtype), None, None, None, None


def _all_to_all(packed: Tensor, counts: Sequence[int], receives: Sequence[int], comm: Communicator) -> Tensor:
    """Send the first ``counts[0]`` rows to rank 0, and so on; return the rows of all ranks, ``receives[r]`` of r."""
    out = packed.new_empty((sum(receives), *packed.shape[1:]))
    sent, received = packed.split(list(counts)), out.split(list(receives))
    received[comm.rank].copy_(sent[comm.rank])
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [Send(rank, sent[rank], LABEL) for rank in others if counts[rank]]
    recvs = [Recv(rank, received[rank]) for rank in others if receives[rank]]
    if sends or recvs:
        comm.exchange(sends, recvs).wait()
    return out
