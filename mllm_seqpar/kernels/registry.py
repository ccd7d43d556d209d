"""The block kernels by name, and the choice of the kernel for a block.

"auto" takes the first kernel of an order of preference that can compute the block. The reason that it returns lists why
each kernel before that one cannot. Nothing is cached, so the choice is right for every group and device.

FlashAttention 3 and 4 come before 2, which leaves half of a Hopper GPU idle. Each comes from its own package. An
implementation that the user has activated in torch's flash operators takes precedence over all packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks.intervals import Intervals

from .base import BlockKernel
from .blocked_matmul import BlockedMatmulKernel
from .flash_attn import FlashAttn3Kernel, FlashAttn4Kernel, FlashAttnKernel
from .fused import TorchCpuKernel
from .torch_cuda import CudaEfficientKernel, CudaFlashKernel, activated_flash

_KERNELS: dict[str, Callable[[], BlockKernel]] = {
    "flash_attn_3": FlashAttn3Kernel,
    "flash_attn_4": FlashAttn4Kernel,
    "flash_attn": FlashAttnKernel,
    "cuda_flash": CudaFlashKernel,
    "cuda_efficient": CudaEfficientKernel,
    "torch_cpu": TorchCpuKernel,
    "blocked_matmul": BlockedMatmulKernel,
}

_AUTO = ("flash_attn_3", "flash_attn_4", "flash_attn", "cuda_flash", "cuda_efficient", "blocked_matmul")
"""Order of preference of "auto" on a GPU (see `_order`); the last one computes every block."""

_AUTO_ON_CPU = ("torch_cpu", "blocked_matmul")


def kernel_names() -> list[str]:
    """Return the names of all kernels, including kernels that cannot run on this machine."""
    return list(_KERNELS)


def available_kernels() -> list[str]:
    """Return the names of the kernels that can run on this machine for some dtype and shape."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probes = [torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=kind) for kind in {"cpu", device}]
    return [name for name, build in _KERNELS.items() if any(build().unsupported_reason(x, x) is None for x in probes)]


def kernel_by_name(name: str) -> BlockKernel:
    """Return the kernel of that name, even if it cannot run on this machine.

    Raises:
        ConfigError: there is no kernel of that name.
    """
    if name not in _KERNELS:
        raise ConfigError(f"kernel={name!r} does not exist; choose auto or one of {', '.join(_KERNELS)}")
    return _KERNELS[name]()


def choose_kernel(name: str, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> tuple[BlockKernel, str]:
    """Return the kernel for a block of q (B, H, S, D) against k (B, G, T, D), and why it was chosen.

    Only the device, dtype and shape of q and k matter, and the mask of the block. If the named kernel does not take the
    mask but computes blocks without one, the block goes to the kernel that "auto" takes. Which blocks have a mask
    differs between ranks, so an error here would end the pass on some ranks while the others wait for them.

    Raises:
        ConfigError: there is no kernel of that name, or it cannot compute this block.
    """
    if name == "auto":
        return _first_supported(q, k, intervals)
    kernel = kernel_by_name(name)
    reason = kernel.unsupported_reason(q, k, intervals)
    if reason is not None and intervals is not None and kernel.unsupported_reason(q, k) is None:
        fallback, fallback_reason = _first_supported(q, k, intervals)
        return fallback, f"{name} {reason}; {fallback_reason}"
    if reason is not None:
        able = [x for x in _KERNELS if _KERNELS[x]().unsupported_reason(q, k, intervals) is None]
        raise ConfigError(
            f"kernel={name!r} cannot compute this block: it {reason}; choose auto or one of {', '.join(able)}"
        )
    return kernel, f"{name}: selected by name"


def _order(q: Tensor) -> Sequence[str]:
    if q.device.type == "cpu":
        return _AUTO_ON_CPU
    return sorted(_AUTO, key=lambda name: name != "cuda_flash") if activated_flash() else _AUTO


def _first_supported(q: Tensor, k: Tensor, intervals: Intervals | None) -> tuple[BlockKernel, str]:
    rejected: list[str] = []
    for name in _order(q):
        kernel = _KERNELS[name]()
        reason = kernel.unsupported_reason(q, k, intervals)
        if reason is None:
            active = f" ({activated_flash()}, activated in torch)" if name == "cuda_flash" and activated_flash() else ""
            return kernel, f"{name}{active}: " + ("; ".join(rejected) or "first choice")
        rejected.append(f"{name} {reason}")
    raise AssertionError("the last kernel of the order computes every block")
