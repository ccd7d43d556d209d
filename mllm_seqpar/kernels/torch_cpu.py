"""Block attention by torch's fused CPU operator (`aten::_scaled_dot_product_flash_attention_for_cpu`).

What the operator gets wrong or leaves open, and what is done about it (torch 2.11 to 2.13):

* zero-length q or k kills the process: such blocks never reach it (`FusedKernel`);
* a row hidden by its mask gets log-sum-exp 0, and -inf in backward gives NaN: both are put right from the mask;
* a last-dim stride other than 1, heads that do not divide, batches that differ: silently wrong, so checked or copied;
* bf16 gives bf16 partials and sums dq over the keys in bf16, and fp16 backward is ten times slower: both are computed
  in float32, a piece of the keys at a time, which also makes the partial results float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import base
from .fused import Call, FusedKernel

KEYS_PER_PIECE = 8192
"""Keys converted to float32 at once for 16-bit inputs."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpuKernel(FusedKernel):
    """Block attention by torch's fused CPU operator, float32 partials for every input dtype. See `BlockKernel`."""

    name = "torch_cpu"
    bias_dtype = torch.float32

    def why_not(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        """Return why the operator cannot compute this block, or None."""
        if q.device.type != "cpu":
            return f"needs CPU tensors, got {q.device.type}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"computes in float32, which is less than {q.dtype}"
        return None

    def _key_step(self, q: Tensor, k: Tensor) -> int:
        return k.shape[2] if q.dtype == torch.float32 else KEYS_PER_PIECE

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = map(_float, (q, k, v))
        return _forward(q, k, v, is_causal=call.causal, attn_mask=call.bias, scale=call.scale)

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = map(_float, (do, q, k, v, o))
        return _backward(do, q, k, v, o, lse, 0.0, call.causal, attn_mask=call.bias, scale=call.scale)


def _float(x: Tensor) -> Tensor:
    """Return x in float32 with unit stride in the last dim."""
    return base.unit_stride(x.float())
