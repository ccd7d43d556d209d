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
from .torch_cuda import (
    CudaKernel,
    flash2_unsupported_reason,
    flash3_unsupported_reason,
    flash4_unsupported_reason,
    vectors,
)


class FlashAttnKernel(CudaKernel):
    """FlashAttention 2 from the flash-attn package. See `BlockKernel`."""

    name = "flash_attn"
    nvidia_only = False

    def _unsupported_shape(self, dim: int, masked: bool, capability: tuple[int, int]) -> str | None:
        return flash2_unsupported_reason(dim, masked, capability) or _flash2_unavailable()

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        q, k, v = _bshd(q, k, v)
        results = _call(_flash2()._flash_attn_forward, q=q, k=k, v=v, return_softmax=False, **_options(args))
        # 2.7 and later return (o, lse, probabilities, state), earlier ones padded copies of q, k, v, o in between.
        o, lse = (results[0], results[1]) if len(results) == 4 else (results[0], results[5])
        return o.transpose(1, 2), lse[..., : q.shape[1]]

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = _bshd(*(x.to(q.dtype) for x in (do, q, k, v, o)))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _call(
            _flash2()._flash_attn_backward,
            **{"dout": do, "q": q, "k": k, "v": v, "out": o, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv},
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=None,
            **_options(args),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class FlashAttn3Kernel(CudaKernel):
    """FlashAttention 3 from the package flash_attn_3, through the operators that it registers with torch."""

    name = "flash_attn_3"

    def _unsupported_shape(self, dim: int, masked: bool, capability: tuple[int, int]) -> str | None:
        return flash3_unsupported_reason(dim, masked, capability) or _flash3_unavailable()

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


class FlashAttn4Kernel(CudaKernel):
    """FlashAttention 4 from the package flash-attn-4 (CuTe). It compiles a kernel per dtype, head dim and GPU."""

    name = "flash_attn_4"

    def _unsupported_shape(self, dim: int, masked: bool, capability: tuple[int, int]) -> str | None:
        return flash4_unsupported_reason(dim, masked, capability) or _flash4_unavailable()

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        options = {"softmax_scale": args.scale, "causal": args.causal}
        o, lse, *_ = _flash4()._flash_attn_fwd(*_bshd(q, k, v), return_lse=True, **options)
        return o.transpose(1, 2), lse

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = _bshd(*(x.to(q.dtype) for x in (do, q, k, v, o)))
        grads = _flash4()._flash_attn_bwd(
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
    """Return the argument names of a function, and whether each is required."""
    # Since 2.7 these are torch custom operators, whose Python signature is (*args, **kwargs).
    original = getattr(function, "_init_fn", function)
    parameters = inspect.signature(original).parameters.values()
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}


def _flash2() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _flash4() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


@cache
def _flash2_unavailable() -> str | None:
    problem = _import_problem("flash_attn.flash_attn_interface", "pip install mllm-seqpar[flash]")
    if problem is None and not all(hasattr(_flash2(), f"_flash_attn_{x}") for x in ("forward", "backward")):
        return "is installed in a release without the low-level functions of 2.5 to 2.8"
    return problem


@cache
def _flash3_unavailable() -> str | None:
    problem = _import_problem("flash_attn_interface", "folder hopper of github.com/Dao-AILab/flash-attention")
    if problem is not None:
        return problem
    needed = {"fwd": {"softmax_scale", "is_causal", "num_splits"}, "bwd": {"dq", "softmax_scale", "deterministic"}}
    for name, arguments in needed.items():
        operator = getattr(torch.ops.flash_attn_3, name, None)
        if operator is None or not arguments <= {x.name for x in operator.default._schema.arguments}:
            return f"is installed in a release without the operator flash_attn_3::{name} of 2.8 and later"
    return None


@cache
def _flash4_unavailable() -> str | None:
    problem = _import_problem("flash_attn.cute.interface", "pip install --pre flash-attn-4")
    if problem is not None:
        return problem
    needed = {"_flash_attn_fwd": {"causal", "return_lse"}, "_flash_attn_bwd": {"causal", "deterministic"}}
    for name, arguments in needed.items():
        function = getattr(_flash4(), name, None)
        if function is None or not arguments <= _declared(function).keys():
            return f"is installed in a release without {name} of 4.0.0b10 and later"
    return None


def _import_problem(module: str, hint: str) -> str | None:
    """Return why a module cannot be imported, or None; a package may be built for another torch or CUDA."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return f"is not installed ({hint})"
        return f"is installed but cannot be imported ({error})"
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"is installed but cannot be imported ({error})"
    return None
