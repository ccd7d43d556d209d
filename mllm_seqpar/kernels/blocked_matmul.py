"""Block attention with plain matrix products: any device, dtype, head_dim and mask, in bounded memory.

"auto" falls back to this kernel. Sums are kept in float32 (float64 for float64 inputs), so partial results are sent
without rounding to bf16.

Scores are computed for one chunk of rows and one chunk of keys at a time, all heads at once. The query heads of one KV
head are rows of a single matrix, so keys are never expanded. Forward is the online softmax (FlashAttention-2, algorithm
1), backward its algorithm 2 with the final log-sum-exp given.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mllm_seqpar.masks.intervals import Intervals

from . import base

KEYS_PER_CHUNK = 512
ROWS_PER_CHUNK = 32
MAX_SCORES_CPU = 1 << 20
"""Scores that exist at once on the CPU: 4 MiB, which stay in cache."""
MAX_SCORES = 1 << 25
"""Scores that exist at once on other devices."""


class BlockedMatmulKernel:
    """Block attention with chunks of matrix products; all results are float32 (float64 for float64 inputs)."""

    name = "blocked_matmul"
    call_entries = 0

    def unsupported_reason(self, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, intervals: Intervals | None = None
    ) -> tuple[Tensor, Tensor]:
        o, lse = base.empty_forward(q)
        if not (q.numel() and k.numel()):
            return o, lse
        for rows in _row_chunks(q, intervals):
            o_rows, lse_rows = _RowChunk(q, k, rows, scale, intervals).attend(k, v)
            o[:, :, rows] = o_rows.view(o[:, :, rows].shape)
            lse[:, :, rows] = lse_rows.view(lse[:, :, rows].shape)
        return o, lse

    def backward(
        self, rows: base.FinalRows, k: Tensor, v: Tensor, *, scale: float, intervals: Intervals | None = None
    ) -> base.Gradients:
        q, _, lse, do, _ = rows
        dq, dk, dv = base.empty_backward(q, k, v)
        if not (q.numel() and k.numel()):
            return dq, dk, dv
        groups, dtype = k.shape[1], _matmul_dtype(q)
        delta, lse = (x.unsqueeze(-1).to(dq.dtype) for x in (rows.deltas(), base.safe_lse(lse)))
        for some in _row_chunks(q, intervals):
            chunk = _RowChunk(q, k, some, scale, intervals)
            do_rows, lse_rows, delta_rows = (base.fold_heads(x[:, :, some], groups) for x in (do.to(dtype), lse, delta))
            dq_rows = torch.zeros_like(chunk.q, dtype=dq.dtype)
            for keys in chunk.key_chunks():
                k_chunk, v_chunk = k[:, :, keys].to(dtype), v[:, :, keys].to(dtype)
                p = chunk.scores(k_chunk, keys).sub_(lse_rows).exp_()
                dv[:, :, keys] += _matmul(p.to(dtype).mT, do_rows)
                ds = _matmul(do_rows, v_chunk.mT).sub_(delta_rows).mul_(p).mul_(scale).to(dtype)
                dq_rows += _matmul(ds, k_chunk)
                dk[:, :, keys] += _matmul(ds.mT, chunk.q)
            dq[:, :, some] = dq_rows.view(dq[:, :, some].shape)
        return dq, dk, dv


class _RowChunk:
    """A chunk of query rows.

    Attributes:
        q: (B, G, R * rows, D), the heads of a group one after another.
        some, all: the keys (start, stop) that some of the rows attend to, and those that all of them attend to.
    """

    def __init__(self, q: Tensor, k: Tensor, rows: slice, scale: float, intervals: Intervals | None) -> None:
        self.q = base.fold_heads(q[:, :, rows], k.shape[1]).to(_matmul_dtype(q))
        self.rows, self.scale, self.intervals = rows, scale, intervals
        self.some = self.all = (0, k.shape[2])
        if intervals is not None:
            low, high = intervals.low[:, rows], intervals.high[:, rows]
            self.some, self.all = intervals.part(rows).span, (int(low.max()), int(high.min()))

    def key_chunks(self) -> Iterator[slice]:
        """Return ranges of the keys that some of the rows attend to."""
        start, stop = self.some
        return (slice(first, min(first + KEYS_PER_CHUNK, stop)) for first in range(start, stop, KEYS_PER_CHUNK))

    def scores(self, k_chunk: Tensor, keys: slice) -> Tensor:
        """Return the scaled scores (B, G, R * rows, keys) in the accumulator dtype, -inf for hidden entries."""
        scores = _matmul(self.q, k_chunk.mT).mul_(self.scale)
        if self.intervals is not None and (keys.start < self.all[0] or keys.stop > self.all[1]):
            hidden = ~self.intervals.expand(scores.device, slice(None), self.rows, keys)
            # Adding one bias of 0 and -inf is several times faster than filling with a mask broadcast over the heads.
            bias = torch.zeros(hidden.shape, dtype=scores.dtype, device=scores.device).masked_fill_(hidden, -torch.inf)
            scores.unflatten(2, (-1, bias.shape[1])).add_(bias[:, None, None])
        return scores

    def attend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of the rows, folded as q, with the online softmax over chunks of keys."""
        dtype, acc = self.q.dtype, base.accumulator(self.q.dtype)
        o = torch.zeros_like(self.q, dtype=acc)
        total = o.new_zeros(*o.shape[:3], 1)
        peak = torch.full_like(total, -torch.inf)
        for keys in self.key_chunks():
            scores = self.scores(k[:, :, keys].to(dtype), keys)
            new_peak = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
            # A row without keys so far has peak -inf; subtracting 0 there keeps exp(-inf - 0) = 0 instead of NaN.
            anchor = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
            p = scores.sub_(anchor).exp_()
            decay = (peak - anchor).exp_()
            total.mul_(decay).add_(p.sum(dim=-1, keepdim=True))
            o.mul_(decay).add_(_matmul(p.to(dtype), v[:, :, keys].to(dtype)))
            peak = new_peak
        # total is 0 exactly for rows that attend to nothing: their o is 0, and log(0) = -inf is their log-sum-exp.
        return o.div_(total.masked_fill(total == 0, 1.0)), (peak.masked_fill(total == 0, 0.0) + total.log()).squeeze(-1)


def _row_chunks(q: Tensor, intervals: Intervals | None) -> Iterator[slice]:
    """Return row ranges whose scores against one chunk of keys, for all heads together, stay within the bound; with
    intervals, few rows, which attend to almost the same keys."""
    bound = MAX_SCORES_CPU if q.device.type == "cpu" else MAX_SCORES
    step = max(1, bound // (KEYS_PER_CHUNK * q.shape[0] * q.shape[1]))
    step = step if intervals is None else min(step, ROWS_PER_CHUNK)
    return (slice(start, min(start + step, q.shape[2])) for start in range(0, q.shape[2], step))


def _matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of factors: the input's if the device multiplies it into float32, else the accumulator's."""
    return x.dtype if x.is_cuda else base.accumulator(x.dtype)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """(B, G, M, K) x (B, G, K, N) -> (B, G, M, N), summed and returned in float32 (float64 for float64)."""
    acc = base.accumulator(a.dtype)
    # Autocast would round these products to 16 bits, regardless of the dtype of the factors.
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == acc:
            return torch.matmul(a, b)
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=acc)
    return product.view(*a.shape[:2], *product.shape[1:])
