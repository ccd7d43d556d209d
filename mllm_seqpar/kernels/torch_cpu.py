"""Block attention with torch's fused CPU operator (`aten::_scaled_dot_product_flash_attention_for_cpu`).

Limits of the operator in torch 2.11 to 2.13, and how this kernel handles them:

* A zero-length q or k crashes the process. `FusedKernel` never passes such blocks on.
* A row that its mask hides has log-sum-exp 0, and -inf in backward gives NaN. Both are corrected from the mask.
* A last-dim stride other than 1, heads that do not divide and different batches give wrong results without an error.
  They are checked or copied.
* For bf16 it returns bf16 partial results and sums dq over the keys in bf16; its fp16 backward is ten times slower.
  Both are computed in float32, a chunk of the keys at a time, so that partial results are float32 too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fused import AttentionArgs, FusedKernel

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpuKernel(FusedKernel):
    """Block attention with torch's fused CPU operator; partial results are float32 for every input dtype."""

    name = "torch_cpu"
    operator_dtype = torch.float32
    converted_keys = 8192

    def unsupported_reason(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        if q.device.type != "cpu":
            return f"needs CPU tensors, got {q.device.type}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"computes in float32, which is less precise than {q.dtype}"
        return None

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        if not q.dtype is k.dtype is torch.float32 or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
            q, k, v = _operands(q, k, v)
        return _forward(q, k, v, is_causal=args.causal, attn_mask=args.bias, scale=args.scale)

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = _operands(do, q, k, v, o)
        return _backward(do, q, k, v, o, lse, 0.0, args.causal, attn_mask=args.bias, scale=args.scale)


def _operands(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in float32 with unit stride in the last dim."""
    found = []
    for x in tensors:
        x = x.float()
        found.append(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())
    return found
