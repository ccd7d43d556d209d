"""Embeddings of visual tokens that replace placeholders in the text: they are sent from the rank that encoded them to
the rank that has the text row.

In a decoder-only model the text has a placeholder for each visual token. The embeddings are sharded by frames, because
each rank encodes its own, and the text is sharded by the layout of the text. One all-to-all sends every embedding to
the ranks that compute its row. Every rank derives from the token ids and the sizes of images how much each rank sends
to each other rank, so only embeddings are sent, and no rank holds the embeddings of all frames unless it has all text
rows.

Shape legend: V visual tokens of the text, x of them encoded by this rank, m in its text rows; s text rows of a sample
on this rank; W width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.base import Recv, Send

LABEL = "visual tokens"

PIECE_BYTES = 1 << 24
"""The embeddings that a rank sends at a time, to all others together: enough to use the whole bandwidth of a link."""


@dataclass(frozen=True)
class FrameTokens:
    """The visual tokens of a text, and the frame of each; on the CPU.

    Attributes:
        samples, positions: (V,) int64, the sample and the position in the text of each visual token, ascending.
        frames: (V,) int64, the number of its frame.
        total: the number of frames.
    """

    samples: Tensor
    positions: Tensor
    frames: Tensor
    total: int

    @classmethod
    def of(cls, samples: Tensor, positions: Tensor, frames: Tensor) -> FrameTokens:
        """Return the visual tokens of a text whose last frame has some of them."""
        return cls(samples, positions, frames, int(frames.max()) + 1 if frames.numel() else 0)

    @classmethod
    def none(cls) -> FrameTokens:
        """Return the visual tokens of a text without frames."""
        empty = torch.zeros(0, dtype=torch.long)
        return cls.of(empty, empty, empty)

    def take(self, kept: Tensor) -> FrameTokens:
        """Return the visual tokens for which `kept` (V,) is True; frames keep their numbers."""
        return replace(self, samples=self.samples[kept], positions=self.positions[kept], frames=self.frames[kept])

    def before(self, length: int) -> FrameTokens:
        """Return the visual tokens among the first `length` tokens of the text, and the frames that have some."""
        kept = self.take(self.positions < length)
        return FrameTokens.of(kept.samples, kept.positions, kept.frames)

    def of_sample(self, sample: int) -> FrameTokens:
        """Return the visual tokens of one sample; frames keep their numbers."""
        return self.take(self.samples == sample)

    def followed_by(self, later: FrameTokens, length: int, rows: Tensor) -> FrameTokens | None:
        """Return these with the tokens of a text behind `length` tokens, whose row b continues the sample ``rows[b]``.

        None: several rows continue one sample, so the sample does not identify the frames of a row.
        """
        if rows.unique().numel() < rows.numel():
            return None
        return FrameTokens(
            torch.cat([self.samples, rows[later.samples]]),
            torch.cat([self.positions, later.positions + length]),
            torch.cat([self.frames, later.frames + self.total]),
            self.total + later.total,
        )


@dataclass(frozen=True)
class VisualTokenLayout:
    """The visual tokens of a text, and which embedding each of them has; on the CPU.

    Attributes:
        tokens: the visual tokens.
        embeddings: (V,) int64, the number of the embedding of each, in the order in which frames are sharded. Beams of
            one sample share embeddings.
        bounds: (n + 1,) int64: rank r encodes the embeddings from ``bounds[r]`` to ``bounds[r + 1]``.
    """

    tokens: FrameTokens
    embeddings: Tensor
    bounds: Tensor

    def between(self, start: int, stop: int) -> VisualTokenLayout:
        """Return the visual tokens at the positions ``start <= l < stop``, counted from `start`."""
        kept = (self.tokens.positions >= start) & (self.tokens.positions < stop)
        tokens = self.tokens.take(kept)
        tokens = replace(tokens, positions=tokens.positions - start)
        return VisualTokenLayout(tokens, self.embeddings[kept], self.bounds)

    def routes(self, rows: Sequence[Tensor], rank: int) -> TokenRoutes:
        """Return what this rank sends and receives.

        Args:
            rows: for each rank, the positions (s,) of the text tokens that it computes, in its order. A position may be
                on several ranks.
            rank: this rank.
        """
        all_positions, first, stop = self.tokens.positions, int(self.bounds[rank]), int(self.bounds[rank + 1])
        own = ((self.embeddings >= first) & (self.embeddings < stop)).nonzero().flatten()
        own_positions, own_embeddings = all_positions[own], self.embeddings[own] - first
        extent = 1 + max((int(x.max()) for x in (all_positions, *rows) if x.numel()), default=0)
        sends: list[Tensor] = []
        for owner, positions in enumerate(rows):
            row_at = torch.full((extent,), -1).index_copy(0, positions, torch.arange(positions.numel()))
            sends.append(own_embeddings[row_at[own_positions] >= 0])
            if owner == rank:
                local = row_at[all_positions]
        here = (local >= 0).nonzero().flatten()
        source = torch.searchsorted(self.bounds[1:].contiguous(), self.embeddings[here], right=True)
        index, order = (self.tokens.samples[here] * rows[rank].numel() + local[here]).sort()
        inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel()))
        receives = [inverse[source == other] for other in range(len(rows))]  # each in the order of the text
        sent = torch.cat(sends)
        return TokenRoutes(sends, receives, index, repeated=sent.unique().numel() < sent.numel())


@dataclass(frozen=True)
class TokenRoutes:
    """One rank's part of the exchange of embeddings.

    Attributes:
        sends: for each rank, the embeddings that it gets, as indices into those of this rank.
        receives: for each rank, which of this rank's m visual tokens the embeddings from it belong to, in the order in
            which that rank sends them.
        index: (m,) int64, the rows of these visual tokens in the flattened (B, s), ascending.
        repeated: whether some embedding of this rank is sent more than once.
    """

    sends: Sequence[Tensor]
    receives: Sequence[Tensor]
    index: Tensor
    repeated: bool

    def on(self, device: torch.device) -> TokenRoutes:
        """Return the routes with their indices on `device`, copied at once."""
        indices = [*self.sends, *self.receives, self.index]
        moved = copy_to_device(torch.cat(indices), device).split([x.numel() for x in indices])
        size = len(self.sends)
        return replace(self, sends=moved[:size], receives=moved[size:-1], index=moved[-1])

    def exchange(self, embeddings: Tensor, comm: Communicator, count: int = 1) -> list[VisualTokens]:
        """Exchange embeddings, `count` of each visual token side by side.

        This rank's (x, count * W) -> `count` tensors (m, W) of its rows, each with its own memory. In addition, a piece
        of at most `PIECE_BYTES` is sent and received at a time.
        """
        routes = self.on(embeddings.device)
        parts: tuple[Tensor, ...] = _ExchangeRows.apply(embeddings, routes, comm, count)
        return [VisualTokens(part, routes.index) for part in parts]


@dataclass(frozen=True)
class VisualTokens:
    """The embeddings (m, W) of this rank's visual tokens, and their rows in the flattened (B, s), ascending."""

    embeddings: Tensor
    index: Tensor

    def replace_rows(self, rows: Tensor) -> Tensor:
        """(B, s, W) -> (B, s, W) with the embeddings in the rows of visual tokens."""
        return rows.flatten(0, 1).index_copy(0, self.index, self.embeddings.to(rows.dtype)).view_as(rows)

    def mask(self, batch: int, rows: int) -> Tensor:
        """Return (B, s) bool: which rows are visual tokens."""
        rows_of_frames = torch.zeros(batch * rows, dtype=torch.bool, device=self.index.device)
        return rows_of_frames.index_fill_(0, self.index, True).view(batch, rows)


class _ExchangeRows(torch.autograd.Function):
    """Local shapes: x (x, c W) -> c times (m, W). Rank r sends ``x[sends[p]]`` to each rank p, and receives likewise.

    Forward: ``out[receives[p]] = x_p[sends_p[r]]`` for all ranks p.
    Backward: dx = sum over ranks p of what they received from this rank, row by row; the gradient of the SUM of the
    losses of all ranks. Each rank sends (x - its own rows) c W elements in forward and (m - its own rows) c W in
    backward. Nothing is saved but indices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: TokenRoutes, comm: Communicator, count: int) -> tuple[Tensor, ...]:
        ctx.routes, ctx.comm, ctx.own, x = routes, comm, x.shape[0], x.detach()
        width = x.shape[1] // count
        out = [x.new_empty((routes.index.numel(), width)) for _ in range(count)]

        def give(index: Tensor) -> Tensor:
            return x.index_select(0, index)

        def take(index: Tensor, piece: Tensor) -> None:
            for part, columns in zip(out, piece.split(width, 1), strict=True):
                part.index_copy_(0, index, columns)

        _move(comm, routes.sends, routes.receives, give, take, x)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        routes: TokenRoutes = ctx.routes
        like = grads[0].new_empty(0, sum(grad.shape[1] for grad in grads))
        # The gradients of an embedding that several rows have are summed, and the sum is rounded once.
        wide = torch.promote_types(like.dtype, torch.float32) if routes.repeated else like.dtype
        dx = like.new_zeros((ctx.own, like.shape[1]), dtype=wide)

        def give(index: Tensor) -> Tensor:
            return torch.cat([grad.index_select(0, index) for grad in grads], 1)

        def take(index: Tensor, piece: Tensor) -> None:
            if routes.repeated:
                dx.index_add_(0, index, piece.to(wide))
            else:
                dx.index_copy_(0, index, piece)

        _move(ctx.comm, routes.receives, routes.sends, give, take, like)
        return dx.to(like.dtype), None, None, None


def _move(
    comm: Communicator,
    sends: Sequence[Tensor],
    receives: Sequence[Tensor],
    give: Callable[[Tensor], Tensor],
    take: Callable[[Tensor, Tensor], None],
    like: Tensor,
) -> None:
    """Move rows like those of `like` (any, width) between all ranks, in pieces.

    `sends` and `receives` are, for each rank, indices of the rows that it gets, and that come from it. `give` returns
    rows, contiguous; `take` takes the rows that have come, always in the same order, rank by rank.
    """
    row = like.shape[1] * like.element_size()
    size = max(1, PIECE_BYTES // max(1, row * max(1, comm.size - 1)))  # rows for each other rank
    longest = max(index.numel() for index in (*sends, *receives))
    for start in range(0, longest, size):
        piece = slice(start, start + size)
        moved = [rank for rank in range(comm.size) if rank != comm.rank]
        given = [Send(rank, give(sends[rank][piece]), LABEL) for rank in moved if sends[rank][piece].numel()]
        taken = {rank: like.new_empty((n, like.shape[1])) for rank in moved if (n := receives[rank][piece].numel())}
        if given or taken:
            comm.exchange(given, [Recv(rank, buffer) for rank, buffer in taken.items()]).wait()
        del given
        for rank in range(comm.size):
            if rank == comm.rank and sends[rank][piece].numel():
                take(receives[rank][piece], give(sends[rank][piece]))
            elif rank in taken:
                take(receives[rank][piece], taken.pop(rank))
