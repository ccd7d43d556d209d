"""Block attention with the fused CUDA operators in torch: FlashAttention and memory-efficient attention.

They are the operators behind `scaled_dot_product_attention`. They are called directly because only they return the
log-sum-exp and take a merged one in backward. Schemas as in torch 2.11 to 2.15; without dropout the random states are
not read.

| | cuda_flash | cuda_efficient |
|---|---|---|
| dtypes | bf16, fp16 | bf16, fp16, fp32 |
| head_dim | multiple of 8, up to 256 | multiple of 8 (fp32: 4) |
| mask | no | yes, additive |
| causal, G < H | own grouping, dk and dv of a head in 16 bits | one call per head of a group |
| log-sum-exp | (B, H, S) | (B, H, S padded to a multiple of 32 with +inf) |

What FlashAttention 2, 3 and 4 compute, in torch and in the packages (`flash_attn`):

| | FlashAttention 2 | 3 | 4 |
|---|---|---|---|
| compute capability | 8.0 and later | 9.x | 9.x, 10.x |
| head_dim, a multiple of 8 | up to 256 | up to 256; deterministic: 192 | up to 256 on 9.x, 128 on 10.x |
| mask | no | no | no |

Sources: csrc/flash_attn/flash_api.cpp (2), hopper/flash_api.cpp (3) and flash_attn/cute/interface.py (4) of
Dao-AILab/flash-attention; torch/nn/attention/_fa3.py and _fa4.py of torch 2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import current_flash_attention_impl

from mllm_seqpar.masks.intervals import Intervals

from .fused import AttentionArgs, FusedKernel

_aten = torch.ops.aten

LSE_ALIGNMENT = 32
POINTER_ALIGNMENT = 16
"""Bytes; both read their inputs in 128-bit vectors."""


class CudaKernel(FusedKernel):
    """Base class: an NVIDIA GPU, inputs that vectors can read, o and do in the input dtype.

    Attributes:
        dtypes: input dtypes of the operator.
        oldest: oldest compute capability of the operator.
        nvidia_only: False if AMD GPUs are supported too.
        takes_masks: whether the operator takes masks other than causal squares.
    """

    mask_entries = 1 << 26
    mask_keys = 1 << 16
    takes_masks = False
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    oldest = (8, 0)
    nvidia_only = True

    def unsupported_reason(self, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> str | None:
        if q.device.type != "cuda" or (self.nvidia_only and torch.version.hip is not None):
            nvidia = " on an NVIDIA GPU" if self.nvidia_only else ""
            return f"needs CUDA tensors{nvidia}, got {'an AMD GPU' if q.is_cuda else q.device.type}"
        if q.dtype not in self.dtypes:
            return f"computes in {', '.join(str(x).removeprefix('torch.') for x in self.dtypes)}, not in {q.dtype}"
        capability = torch.cuda.get_device_capability(q.device)
        oldest = max(self.oldest, (8, 0)) if q.dtype == torch.bfloat16 else self.oldest
        if capability < oldest:
            return f"needs compute capability {oldest[0]}.{oldest[1]}, got {capability[0]}.{capability[1]}"
        vector = 8 if q.element_size() == 2 else 4
        if q.shape[-1] % vector:
            return f"needs a head dim that is a multiple of {vector} in {q.dtype}, got {q.shape[-1]}"
        if not (self.takes_masks or intervals is None or intervals.is_causal):
            return "takes no mask"
        return self._unsupported_here(q.shape[-1], capability)

    def _unsupported_here(self, dim: int, capability: tuple[int, int]) -> str | None:
        """Return why the operator does not take this head dim, or cannot run on this machine, or None."""
        return None


class CudaFlashKernel(CudaKernel):
    """torch's flash operators: FlashAttention 2, or what the user has activated in its place for the whole process, by
    `torch.nn.attention.activate_flash_attention_impl`. Nothing in this package activates one."""

    name = "cuda_flash"

    def _unsupported_here(self, dim: int, capability: tuple[int, int]) -> str | None:
        active = current_flash_attention_impl()
        if active is None:
            return flash_unsupported_reason(2, dim, capability) or (
                None if torch.backends.cuda.is_flash_attention_available() else "is not built into this torch"
            )
        version = {"FA3": 3, "FA4": 4}.get(active)
        if version is None:
            return f"runs {active!r}, activated in torch; only FA3, FA4 and torch's own are known to be right here"
        reason = flash_unsupported_reason(version, dim, capability)
        return reason and f"runs {active}, activated in torch, which {reason}"

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        q, k, v = map(vectors, (q, k, v))
        o, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, args.causal, False, scale=args.scale)
        return o, lse

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = (vectors(x.to(q.dtype)) for x in (do, q, k, v, o))
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        return _aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, *lengths, 0.0, args.causal, seed, offset, scale=args.scale
        )


class CudaEfficientKernel(CudaKernel):
    """Memory-efficient attention as built into torch; the only one of the two for masks and float32."""

    name = "cuda_efficient"
    grouped_causal = False
    takes_masks = True
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    oldest = (5, 0)

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        q, k, v = map(vectors, (q, k, v))
        o, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, _spread(args.bias, q), True, 0.0, args.causal, scale=args.scale
        )
        return o, lse[..., : q.shape[2]]

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v = (vectors(x.to(q.dtype)) for x in (do, q, k, v))
        # The 16-bit operators ignore the row stride of o: they assume that it spans all heads, as forward writes it.
        o = vectors(o.to(q.dtype).transpose(1, 2).contiguous()).transpose(1, 2)
        lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=torch.inf)
        state = torch.empty((), dtype=torch.int64)
        needs_grad = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, _spread(args.bias, q), o, lse, state, state, 0.0, needs_grad, args.causal, scale=args.scale
        )
        return dq, dk, dv


def vectors(x: Tensor) -> Tensor:
    """Return x readable in 128-bit vectors: unit stride in the last dim, every row at an aligned address.

    Strides of dims of length 1 count too: the tensor memory accelerator of Hopper and later checks all of them.
    """
    size = x.element_size()
    aligned = x.data_ptr() % POINTER_ALIGNMENT == 0 and all(s * size % POINTER_ALIGNMENT == 0 for s in x.stride()[:-1])
    return x if aligned and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _spread(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand a bias (B or 1, 1, S, T) to (B, H, S, T) as a view."""
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)


def flash_unsupported_reason(version: int, dim: int, capability: tuple[int, int]) -> str | None:
    """Return why FlashAttention 2, 3 or 4 cannot compute blocks of a head dim, or None; see the table above."""
    major, minor = capability
    limit, where = 256, ""
    if version == 2 and 192 < dim <= 224 and capability not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        # Backward needs more shared memory for these than consumer GPUs have.
        return f"does not differentiate head dims 193 to 224 on compute capability {major}.{minor}"
    if version == 3:
        if major != 9:
            return f"needs compute capability 9.x (Hopper), got {major}.{minor}"
        if torch.are_deterministic_algorithms_enabled():
            limit, where = 192, " with deterministic algorithms"
    if version == 4:
        if major not in (9, 10):
            return f"needs compute capability 9.x or 10.x, got {major}.{minor}"
        limit, where = 256 if major == 9 else 128, f" on compute capability {major}.x"
    return f"takes head dims up to {limit}{where}, got {dim}" if dim > limit else None
