"""Block attention with the packages of FlashAttention 2, 3 and 4, if they are installed.

| kernel | package | imported module | functions |
|---|---|---|---|
| flash_attn | flash-attn 2.5 to 2.8 | flash_attn.flash_attn_interface | _flash_attn_forward, _flash_attn_backward |
| flash_attn_3 | flash_attn_3 (folder hopper) | flash_attn_interface | torch.ops.flash_attn_3.fwd and bwd |
| flash_attn_4 | flash-attn-4, 4.0.0b10 and later | flash_attn.cute.interface | _flash_attn_fwd, _flash_attn_bwd |

The public functions of the packages do not take a log-sum-exp in backward, so these kernels call the low-level ones.
Releases differ in the names of arguments and in the number of results, but not in their meaning. Arguments are
therefore passed by the names that the installed release declares. All three use the layout (B, S, H, D), return a
log-sum-exp (B, H, S) in float32, group heads themselves and align a causal mask at the last row and key, which is the
same for the blocks here (as many rows as keys).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .fused import AttentionArgs
from .torch_cuda import CudaKernel, flash_unsupported_reason, vectors

_PACKAGES: dict[int, tuple[str, str, str, dict[str, set[str]]]] = {
    2: (
        "flash_attn.flash_attn_interface",
        "pip install mllm-seqpar[flash]",
        "2.5 to 2.8",
        {"_flash_attn_forward": set(), "_flash_attn_backward": set()},
    ),
    3: (
        "flash_attn_interface",
        "folder hopper of github.com/Dao-AILab/flash-attention",
        "2.8 and later",
        {"fwd": {"softmax_scale", "is_causal", "num_splits"}, "bwd": {"dq", "softmax_scale", "deterministic"}},
    ),
    4: (
        "flash_attn.cute.interface",
        "pip install --pre flash-attn-4",
        "4.0.0b10 and later",
        {"_flash_attn_fwd": {"causal", "return_lse"}, "_flash_attn_bwd": {"causal", "deterministic"}},
    ),
}
"""By version: the module, how to install it, the releases that work, and their functions with arguments that the kernel
passes and not all releases have."""


class _PackageKernel(CudaKernel):
    """Base class: a version of FlashAttention from its package."""

    version: int

    def _unsupported_here(self, dim: int, capability: tuple[int, int]) -> str | None:
        return flash_unsupported_reason(self.version, dim, capability) or unavailable(self.version)


class FlashAttnKernel(_PackageKernel):
    """FlashAttention 2 from the flash-attn package. See `BlockKernel`."""

    name = "flash_attn"
    version = 2
    nvidia_only = False

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        q, k, v = _bshd(q, k, v)
        results = _call(_functions(2)._flash_attn_forward, q=q, k=k, v=v, return_softmax=False, **_options(args))
        # 2.7 and later return (o, lse, probabilities, state), earlier ones padded copies of q, k, v, o in between.
        o, lse = (results[0], results[1]) if len(results) == 4 else (results[0], results[5])
        return o.transpose(1, 2), lse[..., : q.shape[1]]

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = _bshd(*(x.to(q.dtype) for x in (do, q, k, v, o)))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _call(
            _functions(2)._flash_attn_backward,
            **{"dout": do, "q": q, "k": k, "v": v, "out": o, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv},
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=None,
            **_options(args),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class FlashAttn3Kernel(_PackageKernel):
    """FlashAttention 3 from the package flash_attn_3, through the operators that it registers with torch."""

    name = "flash_attn_3"
    version = 3

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        # 0 splits: the operator splits long keys so that few rows occupy the whole GPU.
        splits = int(torch.are_deterministic_algorithms_enabled())
        o, lse, *_ = torch.ops.flash_attn_3.fwd(
            *_bshd(q, k, v), softmax_scale=args.scale, is_causal=args.causal, num_splits=splits
        )
        return o.transpose(1, 2), lse

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = _bshd(*(x.to(q.dtype) for x in (do, q, k, v, o)))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        torch.ops.flash_attn_3.bwd(
            *(do, q, k, v, o, lse),
            **{"dq": dq, "dk": dk, "dv": dv},
            softmax_scale=args.scale,
            is_causal=args.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class FlashAttn4Kernel(_PackageKernel):
    """FlashAttention 4 from the package flash-attn-4 (CuTe). It compiles a kernel per dtype, head dim and GPU."""

    name = "flash_attn_4"
    version = 4

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        options = {"softmax_scale": args.scale, "causal": args.causal}
        o, lse, *_ = _functions(4)._flash_attn_fwd(*_bshd(q, k, v), return_lse=True, **options)
        return o.transpose(1, 2), lse

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = _bshd(*(x.to(q.dtype) for x in (do, q, k, v, o)))
        grads = _functions(4)._flash_attn_bwd(
            **{"q": q, "k": k, "v": v, "out": o, "dout": do, "lse": lse},
            softmax_scale=args.scale,
            causal=args.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
        return dq, dk, dv


def _bshd(*tensors: Tensor) -> Iterable[Tensor]:
    """(B, H, S, D) -> (B, S, H, D), readable in 128-bit vectors."""
    return (vectors(x).transpose(1, 2) for x in tensors)


def _options(args: AttentionArgs) -> dict[str, Any]:
    """Return the options of both functions of FlashAttention 2, with the names of all supported releases."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": args.scale,
        "causal": args.causal,
        "window_size": (-1, -1),
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _call(function: Callable, **arguments: Any) -> Any:
    """Call `function` with those of the arguments that it declares; the others belong to other releases."""
    declared = _declared(function)
    missing = [name for name, required in declared.items() if required and name not in arguments]
    if missing:
        raise TypeError(
            f"flash-attn's {getattr(function, '__name__', function)} needs {', '.join(missing)}, which releases 2.5 "
            "to 2.8 do not have; install one of those or choose another kernel"
        )
    return function(**{name: value for name, value in arguments.items() if name in declared})


@cache
def _declared(function: Callable) -> dict[str, bool]:
    """Return the argument names of a function or operator, and whether each is required."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        return {x.name: not x.has_default_value() for x in function.default._schema.arguments}
    # Since 2.7 these are torch custom operators, whose Python signature is (*args, **kwargs).
    original = getattr(function, "_init_fn", function)
    parameters = inspect.signature(original).parameters.values()
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}


def _functions(version: int) -> Any:
    """Return what has the functions of a package."""
    return torch.ops.flash_attn_3 if version == 3 else importlib.import_module(_PACKAGES[version][0])


@cache
def unavailable(version: int) -> str | None:
    """Return why the package of a version cannot be used, or None; it may be built for another torch or CUDA."""
    module, hint, releases, needed = _PACKAGES[version]
    try:
        importlib.import_module(module)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return f"is not installed ({hint})"
        return f"is installed but cannot be imported ({error})"
    for name, arguments in needed.items():
        function = getattr(_functions(version), name, None)
        if function is None or not arguments <= _declared(function).keys():
            what = f"the operator flash_attn_3::{name}" if version == 3 else name
            return f"is installed in a release without {what} of {releases}"
    return None
