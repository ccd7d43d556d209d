"""Which block kernels exist, and which one computes a given block.

`auto` walks a fixed order of preference and takes the first kernel that can compute the block; the reason it returns
says why each kernel before that was passed over. Nothing is cached, so nothing can go stale between groups or devices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError

from .base import BlockKernel
from .blocked_matmul import BlockedMatmulKernel
from .flash_attn import FlashAttnKernel
from .reference import ReferenceKernel
from .torch_cpu import TorchCpuKernel
from .torch_cuda import CudaCudnnKernel, CudaEfficientKernel, CudaFlashKernel

_KERNELS: dict[str, Callable[[], BlockKernel]] = {
    "flash_attn": FlashAttnKernel,
    "cuda_flash": CudaFlashKernel,
    "cuda_cudnn": CudaCudnnKernel,
    "cuda_efficient": CudaEfficientKernel,
    "torch_cpu": TorchCpuKernel,
    "tiled": BlockedMatmulKernel,
    "reference": ReferenceKernel,
}

_AUTO = ("flash_attn", "cuda_flash", "cuda_efficient", "torch_cpu", "tiled")
"""Order of preference of `auto`. "tiled" computes everything, so the walk always ends."""


def kernel_names() -> list[str]:
    """Return the names of all kernels, those that cannot run here included."""
    return list(_KERNELS)


def available_kernels() -> list[str]:
    """Return the names of the kernels that can run on this machine with what is installed, on some dtype and shape."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probes = [torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=kind) for kind in {"cpu", device}]
    return [
        name
        for name, build in _KERNELS.items()
        if any(build().why_not(x, x, causal=False, masked=False) is None for x in probes)
    ]


def kernel_by_name(name: str) -> BlockKernel:
    """Return the kernel of that name, whether it can run here or not.

    Raises:
        ConfigError: a name that does not exist.
    """
    if name not in _KERNELS:
        raise ConfigError(f"kernel={name!r} does not exist; choose auto or one of {', '.join(_KERNELS)}")
    return _KERNELS[name]()


def choose_kernel(name: str, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> tuple[BlockKernel, str]:
    """Return the kernel for a block of q (B, H, S, D) against k (B, G, T, D), and why it was chosen.

    Only device, dtype and shape of q and k are looked at. `masked` tells whether blocks will come with a mask: those go
    to the kernel that "auto" takes where the named one computes all others but takes no mask. Which blocks come with
    one differs by rank and by padding, so refusing them would end a pass on some ranks, and leave the others waiting.

    Raises:
        ConfigError: a name that does not exist, or a named kernel that cannot compute this block.
    """
    if name == "auto":
        return _first_able(q, k, causal, masked)
    kernel = kernel_by_name(name)
    obstacle = kernel.why_not(q, k, causal=causal, masked=masked)
    if obstacle is not None and masked and kernel.why_not(q, k, causal=causal, masked=False) is None:
        instead, reason = _first_able(q, k, causal, masked)
        return instead, f"{name} {obstacle}; {reason}"
    if obstacle is not None:
        able = [x for x in _KERNELS if _KERNELS[x]().why_not(q, k, causal=causal, masked=masked) is None]
        raise ConfigError(
            f"kernel={name!r} cannot compute this block: it {obstacle}; choose auto or one of {', '.join(able)}"
        )
    return kernel, f"{name}: asked for by name"


def _first_able(q: Tensor, k: Tensor, causal: bool, masked: bool) -> tuple[BlockKernel, str]:
    passed_over: list[str] = []
    for name in _AUTO:
        kernel = _KERNELS[name]()
        obstacle = kernel.why_not(q, k, causal=causal, masked=masked)
        if obstacle is None:
            return kernel, f"{name}: " + ("; ".join(passed_over) or "first choice")
        passed_over.append(f"{name} {obstacle}")
    raise AssertionError("the last kernel of the order computes every block")
