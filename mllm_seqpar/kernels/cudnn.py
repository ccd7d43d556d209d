"""Block attention with cuDNN, through torch's operators: the fastest on Hopper and Blackwell for blocks without a mask.

Sources: aten/src/ATen/native/cudnn/MHA.cpp and transformers/cuda/sdp_utils.cpp of torch 2.11 to 2.13. What follows from
them:

* torch keeps one plan of cuDNN for each shape and strides of q, k and v, in each thread. It does not look at those of
  o and do, so q, o and do are contiguous here. The scale is no part of a plan.
* The log-sum-exp is (B, H, S, 1) float32, natural; backward takes a merged one. Without dropout it reads no random
  state, and lengths are those of the tensors.
* Grouped heads are folded into rows, as for the other operators, so a block has G heads. If these are too few tiles of
  rows to occupy the GPU, the keys are divided into equal parts, which are items of a batch for cuDNN. Their results are
  merged by their log-sum-exp, and their dq are added.
* Backward adds dq in an order that differs between runs. With `torch.use_deterministic_algorithms(True)`, torch does
  not use cuDNN, and neither does this kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mllm_seqpar.masks.intervals import Intervals

from .fused import AttentionArgs
from .torch_cuda import CudaKernel, vectors
from .triton_launches import unsupported_device

_aten = torch.ops.aten

OLDEST = 91501
"""Before cuDNN 9.15.1, results could be wrong for lengths that 128 does not divide (pytorch issue 169849)."""
ROWS_OF_A_TILE = 128
"""Rows that one multiprocessor computes at a time, in forward."""
PARTS = 16
"""Into at most so many parts the keys are divided."""


class CudaCudnnKernel(CudaKernel):
    """cuDNN's attention through torch, from compute capability 9.0. See `BlockKernel`."""

    name = "cuda_cudnn"
    oldest = (9, 0)

    def unsupported_reason(self, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> str | None:
        if k.shape[2] == 1:
            return "needs more than one key"
        return super().unsupported_reason(q, k, intervals)

    def _unsupported_here(self, dim: int, capability: tuple[int, int]) -> str | None:
        limit = 256 if capability == (9, 0) else 128
        if dim > limit:
            return f"takes head dims up to {limit} on compute capability {capability[0]}.{capability[1]}, got {dim}"
        if torch.are_deterministic_algorithms_enabled():
            return "is not deterministic"
        version = torch.backends.cudnn.version()
        if version is None or version < OLDEST:
            return f"needs cuDNN {OLDEST} or later, found {version}"
        return None

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        parts = 1 if args.causal else parts_of_keys(q, k)
        k, v = (_in_parts(vectors(x), parts) for x in (k, v))
        rows = q.expand(parts, -1, -1, -1) if parts > 1 else q
        o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            rows.contiguous(), k, v, None, True, 0.0, args.causal, False, scale=args.scale
        )
        lse = lse.view(lse.shape[:3])
        if parts == 1:
            return o, lse
        o, lse = torch.ops.mllm_seqpar.merge_parts(o, lse)
        return o.unsqueeze(0), lse.unsqueeze(0)

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts, shape = 1 if args.causal else parts_of_keys(q, k), k.shape
        k, v = (_in_parts(vectors(x), parts) for x in (k, v))
        rows = [x.to(q.dtype) for x in (do, q, o)]
        if parts > 1:
            rows, lse = [x.expand(parts, -1, -1, -1) for x in rows], lse.expand(parts, -1, -1)
        do, q, o, lse = (x.contiguous() for x in (*rows, lse.unsqueeze(-1)))
        state = torch.empty((), dtype=torch.int64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, state, state, None, *lengths, 0.0, args.causal, scale=args.scale
        )
        if parts == 1:
            return dq, dk, dv
        dk, dv = (x.transpose(0, 1).reshape(shape) for x in (dk, dv))
        return dq.sum(0, keepdim=True, dtype=torch.float32), dk, dv


def parts_of_keys(q: Tensor, k: Tensor) -> int:
    """Return into how many equal parts the keys are divided, for folded rows q (B, G, S, D).

    It is the smallest divisor of their number with which the tiles of rows occupy all multiprocessors, or 1 if there is
    none up to `PARTS`, and for a batch, whose parts would not be views.
    """
    if unsupported_device(q.device) is not None:  # to merge the results
        return 1
    tiles = q.shape[1] * -(-q.shape[2] // ROWS_OF_A_TILE)
    wanted = multiprocessors(q) // tiles
    if q.shape[0] > 1 or wanted < 2:
        return 1
    return next((n for n in range(min(wanted, PARTS), PARTS + 1) if k.shape[2] % n == 0), 1)


def multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of the device of x."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _in_parts(x: Tensor, parts: int) -> Tensor:
    """(1, G, T, D) -> (parts, G, T / parts, D), a view."""
    return x if parts == 1 else x.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)
