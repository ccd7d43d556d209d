"""The block kernels by name, and the choice of the kernel for a block.

"auto" takes the first kernel of an order of preference that can compute the block. The reason that it returns lists why
each kernel before that one cannot. Nothing is cached, so the choice is right for every group and device.

Kernels whose rates were measured come first, the fastest before the others. On Hopper, these are the rates of blocks
without a mask in `RATES`. A cluster file that `mllm-seqpar calibrate` has written replaces them by those of its machine
(`KernelRate`). An implementation that the user has activated in torch's flash operators takes precedence over all of
them. Masks go to the Triton kernel for intervals, and where Triton is not installed, to `cuda_efficient`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks.intervals import Intervals

from .base import BlockKernel
from .fused import TorchCpuKernel


def _of(module: str, name: str) -> Callable[[], BlockKernel]:
    """Return what makes a kernel whose module is imported once a block may need it: on the CPU, few do."""
    return lambda: getattr(importlib.import_module(f".{module}", __package__), name)()


_KERNELS: dict[str, Callable[[], BlockKernel]] = {
    "flash_attn_3": _of("flash_attn", "FlashAttn3Kernel"),
    "flash_attn_4": _of("flash_attn", "FlashAttn4Kernel"),
    "flash_attn": _of("flash_attn", "FlashAttnKernel"),
    "cuda_cudnn": _of("cudnn", "CudaCudnnKernel"),
    "cuda_flash": _of("torch_cuda", "CudaFlashKernel"),
    "triton_intervals": _of("triton_intervals", "TritonIntervalsKernel"),
    "cuda_efficient": _of("torch_cuda", "CudaEfficientKernel"),
    "torch_cpu": TorchCpuKernel,
    "blocked_matmul": _of("blocked_matmul", "BlockedMatmulKernel"),
}

_AUTO = (
    *("flash_attn_3", "flash_attn_4", "cuda_cudnn", "flash_attn", "cuda_flash"),
    *("cuda_efficient", "triton_intervals", "blocked_matmul"),
)
"""Order of preference of "auto" on a GPU (see `_order`); the last one computes every block."""

_AUTO_WITH_MASK = ("triton_intervals", "cuda_efficient", "blocked_matmul")
"""The same for masks other than causal squares."""


class KernelRate(NamedTuple):
    """The measured rate of a kernel.

    Attributes:
        kernel: its name.
        dim: the head dim. The rate counts for smaller ones too, if none was measured between them.
        masked: whether it is the rate under a mask, of visible entries.
        forward, backward: FLOP/s, counting 4 (backward: 10) FLOPs per visible entry, head and channel of the head.
    """

    kernel: str
    dim: int
    masked: bool
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """The time of a unit of work, forward and backward."""
        return 4 / self.forward + 10 / self.backward


KernelOption = str | tuple[KernelRate, ...]
"""The name of a kernel, "auto", or the rates by which "auto" decides."""

RATES = (
    KernelRate("flash_attn_3", 64, False, 497e12, 474e12),
    KernelRate("flash_attn_3", 128, False, 648e12, 561e12),
    KernelRate("cuda_cudnn", 64, False, 483e12, 460e12),
    KernelRate("cuda_cudnn", 128, False, 663e12, 545e12),
    *(
        rate
        for name in ("flash_attn_4", "flash_attn", "cuda_flash")  # 4 was not measured; it is not slower than 2
        for rate in (KernelRate(name, 64, False, 303e12, 279e12), KernelRate(name, 128, False, 349e12, 318e12))
    ),
)
"""The rates of kernels without a mask on Hopper, in bf16.

8,192 rows of 28 heads (head dim 64: 8) against 65,536 keys, on an H200 with torch 2.11 and cuDNN 9.19; FlashAttention 3
from its paper (arXiv 2407.08608), on an H100. With 128 rows, FlashAttention 2 reaches 242 and 133, cuDNN 125 and 227
without a division of the keys.
"""

ROWS_OF_CUDNN = 128
"""With fewer folded rows for each KV head, as in decoding, FlashAttention 2 precedes cuDNN: it divides the keys itself,
and needs no plan for each number of keys."""

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


def choose_kernel(
    option: KernelOption, q: Tensor, k: Tensor, intervals: Intervals | None = None
) -> tuple[BlockKernel, str]:
    """Return the kernel for a block of q (B, H, S, D) against k (B, G, T, D), and why it was chosen.

    Only the device, dtype and shape of q and k matter, and the mask of the block. If the named kernel does not take the
    mask but computes blocks without one, the block goes to the kernel that "auto" takes. Which blocks have a mask
    differs between ranks, so an error here would end the pass on some ranks while the others wait for them.

    Raises:
        ConfigError: there is no kernel of that name, or it cannot compute this block.
    """
    if not isinstance(option, str):
        return _first_supported(q, k, intervals, option)
    if option == "auto":
        return _first_supported(q, k, intervals)
    kernel = kernel_by_name(option)
    reason = kernel.unsupported_reason(q, k, intervals)
    if reason is not None and intervals is not None and kernel.unsupported_reason(q, k) is None:
        fallback, fallback_reason = _first_supported(q, k, intervals)
        return fallback, f"{option} {reason}; {fallback_reason}"
    if reason is not None:
        able = [x for x in _KERNELS if _KERNELS[x]().unsupported_reason(q, k, intervals) is None]
        raise ConfigError(
            f"kernel={option!r} cannot compute this block: it {reason}; choose auto or one of {', '.join(able)}"
        )
    return kernel, f"{option}: selected by name"


def _order(q: Tensor, k: Tensor, intervals: Intervals | None, measured: tuple[KernelRate, ...] | None) -> list[str]:
    masked = intervals is not None and not intervals.is_causal
    names = list(_AUTO_ON_CPU if q.device.type == "cpu" else _AUTO_WITH_MASK if masked else _AUTO)
    if "cuda_cudnn" in names and q.shape[1] * q.shape[2] < ROWS_OF_CUDNN * k.shape[1]:
        names.remove("cuda_cudnn")
    if measured is None and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9:
        measured = RATES
    if measured is not None:  # of each kernel, the rate of the smallest head dim from that of the block on
        fitting = [rate for rate in measured if rate.masked == masked and rate.dim >= q.shape[3]]
        seconds = {rate.kernel: rate.seconds for rate in sorted(fitting, key=lambda rate: -rate.dim)}
        names.sort(key=lambda name: seconds.get(name, float("inf")))
    if "cuda_flash" in names and current_flash_attention_impl():
        names.sort(key=lambda name: name != "cuda_flash")
    return names


def _first_supported(
    q: Tensor, k: Tensor, intervals: Intervals | None, measured: tuple[KernelRate, ...] | None = None
) -> tuple[BlockKernel, str]:
    rejected: list[str] = []
    for name in _order(q, k, intervals, measured):
        kernel = _KERNELS[name]()
        reason = kernel.unsupported_reason(q, k, intervals)
        if reason is None:
            active = current_flash_attention_impl() if name == "cuda_flash" else None
            named = f"{name} ({active}, activated in torch)" if active else name
            return kernel, f"{named}: " + ("; ".join(rejected) or "first choice")
        rejected.append(f"{name} {reason}")
    raise AssertionError("the last kernel of the order computes every block")
