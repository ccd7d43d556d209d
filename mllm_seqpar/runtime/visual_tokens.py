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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.base import Recv, Send

from .attention_record import FrameTokens

LABEL = "visual tokens"

PIECE_BYTES = 1 << 24
"""The embeddings that a rank sends at a time, to all others together: enough to use the whole bandwidth of a link."""


@dataclass(frozen=True)
class VisualTokenLayout:
    """Where the visual tokens of a text are, and which embedding each of them has; on the CPU.

    Attributes:
        samples, positions: (N,) int64, the sample and the position in the text of each visual token, ascending.
        embeddings: (N,) int64, the number of its embedding, in the order in which frames are sharded. Beams of one
            sample share embeddings.
        frames: (N,) int64, the frame that it belongs to.
        bounds: (n + 1,) int64: rank r encodes the embeddings from ``bounds[r]`` to ``bounds[r + 1]``.
    """

    samples: Tensor
    positions: Tensor
    embeddings: Tensor
    frames: Tensor
    bounds: Tensor

    def between(self, start: int, stop: int) -> VisualTokenLayout:
        """Return the visual tokens at the positions ``start <= l < stop``, counted from `start`."""
        kept = ((self.positions >= start) & (self.positions < stop)).nonzero().flatten()
        rows = self.samples[kept], self.positions[kept] - start, self.embeddings[kept], self.frames[kept]
        return VisualTokenLayout(*rows, self.bounds)

    @property
    def tokens(self) -> FrameTokens:
        """Return the frame of each visual token."""
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
        index, order = (self.samples[here] * rows[rank].numel() + local[here]).sort()
        sorted_places = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel()))
        receives = [sorted_places[source == other] for other in range(len(rows))]  # each in the order of the text
        return TokenRoutes(sends, receives, index)


@dataclass(frozen=True)
class TokenRoutes:
    """One rank's part of the exchange of embeddings; on the CPU.

    Attributes:
        sends: for each rank, the embeddings that it gets, as indices into those of this rank.
        receives: for each rank, which of this rank's m visual tokens the embeddings from it belong to, in the order in
            which that rank sends them.
        index: (m,) int64, the rows of these visual tokens in the flattened (B, s), ascending.
    """

    sends: Sequence[Tensor]
    receives: Sequence[Tensor]
    index: Tensor

    def exchange(self, embeddings: Tensor, comm: Communicator, count: int = 1) -> list[VisualTokens]:
        """Exchange embeddings, `count` of each visual token side by side.

        This rank's (x, count * W) -> `count` times the (m, W) of its rows, each in memory of its own. Beside these, a
        piece of at most `PIECE_BYTES` is sent and received at a time.
        """
        indices = [*self.sends, *self.receives, self.index]
        moved = copy_to_device(torch.cat(indices), embeddings.device).split([x.numel() for x in indices])
        sends, receives, index = moved[: comm.size], moved[comm.size : -1], moved[-1]
        used = torch.cat(list(self.sends)).unique().numel()
        moves = _Moves(comm, sends, receives, embeddings.shape[0], index.numel(), used)
        found: tuple[Tensor, ...] = _ExchangeRows.apply(embeddings, moves, count)
        return [VisualTokens(part, index) for part in found]


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
        found = torch.zeros(batch * rows, dtype=torch.bool, device=self.index.device)
        return found.index_fill_(0, self.index, True).view(batch, rows)


@dataclass(frozen=True)
class _Moves:
    """What `_ExchangeRows` needs besides the embeddings, with the indices of `TokenRoutes` on their device.

    Attributes:
        own: x, the number of embeddings of this rank.
        rows: m, the number of visual tokens in its rows.
        used: how many different ones of the x are sent, to others or to this rank itself.
    """

    comm: Communicator
    sends: Sequence[Tensor]
    receives: Sequence[Tensor]
    own: int
    rows: int
    used: int


class _ExchangeRows(torch.autograd.Function):
    """Local shapes: x (x, c W) -> c times (m, W). Rank r sends ``x[sends[p]]`` to each rank p, and receives likewise.

    Forward: ``out[receives[p]] = x_p[sends_p[r]]`` for all ranks p.
    Backward: dx = sum over ranks p of what they received from this rank, row by row; the gradient of the SUM of the
    losses of all ranks. Each rank sends (x - its own rows) c W elements in forward and (m - its own rows) c W in
    backward. Nothing is saved but indices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: _Moves, count: int) -> tuple[Tensor, ...]:
        ctx.moves, x = moves, x.detach()
        width = x.shape[1] // count
        out = [x.new_empty((moves.rows, width)) for _ in range(count)]

        def give(index: Tensor) -> Tensor:
            return x.index_select(0, index)

        def take(index: Tensor, piece: Tensor) -> None:
            for part, columns in zip(out, piece.split(width, 1), strict=True):
                part.index_copy_(0, index, columns)

        _move(moves.comm, moves.sends, moves.receives, give, take, x)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        moves: _Moves = ctx.moves
        like = grads[0].new_empty(0, sum(grad.shape[1] for grad in grads))
        # An embedding that several rows have sums their gradients, which is rounded once.
        repeated = moves.used < sum(index.numel() for index in moves.sends)
        wide = torch.promote_types(like.dtype, torch.float32) if repeated else like.dtype
        dx = like.new_zeros((moves.own, like.shape[1]), dtype=wide)

        def give(index: Tensor) -> Tensor:
            return torch.cat([grad.index_select(0, index) for grad in grads], 1)

        def take(index: Tensor, piece: Tensor) -> None:
            if repeated:
                dx.index_add_(0, index, piece.to(wide))
            else:
                dx.index_copy_(0, index, piece)

        _move(moves.comm, moves.receives, moves.sends, give, take, like)
        return dx.to(like.dtype), None, None


def _move(
    comm: Communicator,
    sends: Sequence[Tensor],
    receives: Sequence[Tensor],
    give: Callable[[Tensor], Tensor],
    take: Callable[[Tensor, Tensor], None],
    like: Tensor,
) -> None:
    """Move rows like those of `like` between all ranks, in pieces.

    Args:
        comm: the group.
        sends, receives: for each rank, indices of the rows that it gets, and that come from it.
        give: returns the rows with these indices, contiguous.
        take: takes the rows that have come for these indices; always called in the same order, rank by rank.
        like: (any, width).
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
