"""Block attention over intervals of keys on a GPU, in Triton.

One launch computes the output of a block, one dq, and one dk and dv, whatever the mask. Keys that no row of a tile sees
are skipped, and only tiles of keys on the border of an interval are compared with it. Partial results are float32, and
sums have a fixed order. If there are too few rows to occupy the GPU, forward and dq divide the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mllm_seqpar.masks.intervals import Intervals

from .base import FinalRows, Gradients, empty_backward, empty_forward
from .triton_launches import unsupported_device


class TritonIntervalsKernel:
    """Attention over intervals of keys for NVIDIA GPUs from compute capability 8.0. See `BlockKernel`."""

    name = "triton_intervals"
    call_entries = 0

    def unsupported_reason(self, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> str | None:
        problem = unsupported_device(q.device)
        if problem is not None:
            return problem
        if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"computes in float32, which is less precise than {q.dtype}"
        return f"takes head dims up to 256, got {q.shape[-1]}" if q.shape[-1] > 256 else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, intervals: Intervals | None = None
    ) -> tuple[Tensor, Tensor]:
        if not (q.numel() and k.numel()):
            return empty_forward(q)
        low, high = (None, None) if intervals is None else intervals.on(q.device)
        return torch.ops.mllm_seqpar.interval_attention(q, k, v, low, high, scale)

    def backward(
        self, rows: FinalRows, k: Tensor, v: Tensor, *, scale: float, intervals: Intervals | None = None
    ) -> Gradients:
        q, _, lse, do, _ = rows
        if not (q.numel() and k.numel()):
            return empty_backward(q, k, v)
        low, high = (None, None) if intervals is None else intervals.on(q.device)
        of_rows = lse.contiguous(), rows.deltas().contiguous()
        return torch.ops.mllm_seqpar.interval_attention_backward(do, q, k, v, low, high, *of_rows, scale)
