"""Block attention from plain matrix products: any device, dtype, head dim and mask; memory bounded by a tile.

This is the kernel without prerequisites and what `auto` falls back to. Sums are kept in float32 (float64 for float64
inputs), so the partial results that travel are not rounded to bf16.

Scores are formed for a tile of rows x keys at a time, all heads at once, with the query heads of one key head as rows
of a single matrix (keys are never expanded). Forward is the online softmax (FlashAttention-2, algorithm 1), backward
its algorithm 2 with the final log-sum-exp given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import base

KEYS_PER_TILE = 512
SCORES_PER_TILE = {"cpu": 1 << 20}
"""Scores held at once, by device type: 4 MiB on CPU, where a tile should stay in cache."""
SCORES_PER_TILE_ELSEWHERE = 1 << 25


class BlockedMatmulKernel:
    """Block attention by tiles of matrix products, accumulating in float32. See `BlockKernel`."""

    name = "tiled"

    def why_not(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        """Return None: tiles of matrix products compute every block."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend; o and lse in float32 (float64 for float64 inputs). See `BlockKernel.forward`."""
        base.check_block(q, k, v, causal=causal, mask=mask)
        o, lse = base.empty_forward(q)
        if base.is_empty(q, k):
            return o, lse
        for rows in _row_tiles(q):
            tile = _Rows.take(q, k, rows, scale)
            o_rows, lse_rows = _attend_rows(tile, k, v, causal, mask)
            o[:, :, rows] = o_rows.view(o[:, :, rows].shape)
            lse[:, :, rows] = lse_rows.view(lse[:, :, rows].shape)
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        scale: float,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate; float32 gradients (float64 for float64 inputs). See `BlockKernel.backward`."""
        base.check_block(q, k, v, causal=causal, mask=mask)
        base.check_final(do, q, o, lse)
        dq, dk, dv = base.empty_backward(q, k, v)
        if base.is_empty(q, k):
            return dq, dk, dv
        groups, dtype = k.shape[1], _work_dtype(q)
        delta = (do.to(dq.dtype) * o.to(dq.dtype)).sum(dim=-1, keepdim=True)
        lse = base.safe_lse(lse).unsqueeze(-1).to(dq.dtype)
        for rows in _row_tiles(q):
            tile = _Rows.take(q, k, rows, scale)
            do_rows, lse_rows, delta_rows = (
                base.fold_groups(x[:, :, rows], groups) for x in (do.to(dtype), lse, delta)
            )
            dq_rows = torch.zeros_like(tile.q, dtype=dq.dtype)
            for keys in _key_tiles(k, rows, causal):
                k_tile, v_tile = k[:, :, keys].to(dtype), v[:, :, keys].to(dtype)
                p = tile.scores(k_tile, keys, causal, mask).sub_(lse_rows).exp_()
                dv[:, :, keys] += _matmul(p.to(dtype).mT, do_rows)
                ds = _matmul(do_rows, v_tile.mT).sub_(delta_rows).mul_(p).mul_(scale).to(dtype)
                dq_rows += _matmul(ds, k_tile)
                dk[:, :, keys] += _matmul(ds.mT, tile.q)
            dq[:, :, rows] = dq_rows.view(dq[:, :, rows].shape)
        return dq, dk, dv


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A tile of query rows: q is (B, G, R * rows, D), the heads of a group one after another."""

    q: Tensor
    rows: slice
    scale: float

    @classmethod
    def take(cls, q: Tensor, k: Tensor, rows: slice, scale: float) -> _Rows:
        return cls(q=base.fold_groups(q[:, :, rows], k.shape[1]).to(_work_dtype(q)), rows=rows, scale=scale)

    def scores(self, k_tile: Tensor, keys: slice, causal: bool, mask: Tensor | None) -> Tensor:
        """Return the scaled scores (B, G, R * rows, keys) in the accumulator's dtype, -inf where hidden."""
        scores = _matmul(self.q, k_tile.mT).mul_(self.scale)
        hidden = self._hidden(keys, causal, mask, scores.device)
        if hidden is not None:
            # Adding -inf once per tile is several times faster than filling through a mask broadcast over the heads.
            bias = torch.zeros(hidden.shape, dtype=scores.dtype, device=scores.device).masked_fill_(hidden, -torch.inf)
            scores.unflatten(2, (-1, bias.shape[1])).add_(bias[:, None, None])
        return scores

    def _hidden(self, keys: slice, causal: bool, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Return which (batch or 1, rows, keys) of this tile are hidden, None when none is for certain."""
        if mask is not None:
            return ~mask[:, self.rows, keys]
        if causal and keys.stop - 1 > self.rows.start:
            row = torch.arange(self.rows.start, self.rows.stop, device=device)
            return (torch.arange(keys.start, keys.stop, device=device) > row[:, None]).unsqueeze(0)
        return None


def _attend_rows(tile: _Rows, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of a tile of rows, folded as the tile is, by the online softmax over tiles of keys."""
    dtype, acc = tile.q.dtype, base.accumulator(tile.q.dtype)
    o = torch.zeros_like(tile.q, dtype=acc)
    total = o.new_zeros(*o.shape[:3], 1)
    peak = torch.full_like(total, -torch.inf)
    for keys in _key_tiles(k, tile.rows, causal):
        scores = tile.scores(k[:, :, keys].to(dtype), keys, causal, mask)
        new_peak = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
        # A row that has seen nothing has peak -inf; subtracting 0 there keeps exp(-inf - 0) = 0 instead of NaN.
        anchor = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
        p = scores.sub_(anchor).exp_()
        decay = (peak - anchor).exp_()
        total.mul_(decay).add_(p.sum(dim=-1, keepdim=True))
        o.mul_(decay).add_(_matmul(p.to(dtype), v[:, :, keys].to(dtype)))
        peak = new_peak
    # total is 0 exactly where nothing was seen: o is 0 there and log(0) = -inf is the answer.
    return o.div_(total.masked_fill(total == 0, 1.0)), (peak.masked_fill(total == 0, 0.0) + total.log()).squeeze(-1)


def _row_tiles(q: Tensor) -> Iterator[slice]:
    """Yield row ranges whose scores against one tile of keys, all heads together, stay within the bound."""
    bound = SCORES_PER_TILE.get(q.device.type, SCORES_PER_TILE_ELSEWHERE)
    step = max(1, bound // (KEYS_PER_TILE * q.shape[0] * q.shape[1]))
    return (slice(start, min(start + step, q.shape[2])) for start in range(0, q.shape[2], step))


def _key_tiles(k: Tensor, rows: slice, causal: bool) -> Iterator[slice]:
    """Yield key ranges that some of the rows see; tiles entirely in the future are left out."""
    stop = rows.stop if causal else k.shape[2]
    return (slice(start, min(start + KEYS_PER_TILE, stop)) for start in range(0, stop, KEYS_PER_TILE))


def _work_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the factors: the input's where the device multiplies it into float32, the sum's otherwise."""
    return x.dtype if x.is_cuda else base.accumulator(x.dtype)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """(B, G, M, K) x (B, G, K, N) -> (B, G, M, N), summed and returned in float32 (float64 for float64)."""
    acc = base.accumulator(a.dtype)
    # Under autocast these products would be rounded to 16 bits, whatever dtype they were asked for in.
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == acc:
            return torch.matmul(a, b)
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=acc)
    return product.view(*a.shape[:2], *product.shape[1:])
