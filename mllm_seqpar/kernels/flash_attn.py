"""Block attention with the flash-attn package (FlashAttention-2, releases 2.5 to 2.8), if it is installed.

The public functions of the package do not take a log-sum-exp in backward, so this kernel calls its low-level functions.
Releases differ in the names of the arguments and in the number of results, but not in their meaning. Arguments are
therefore passed by the names that the installed release declares.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .fused import AttentionArgs, FusedKernel
from .torch_cuda import flash2_unsupported_reason, vectors


class FlashAttnKernel(FusedKernel):
    """FlashAttention-2 from the flash-attn package; layout (B, S, H, D) inside. See `BlockKernel`."""

    name = "flash_attn"

    def unsupported_reason(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        if q.device.type != "cuda":
            return f"needs CUDA tensors, got {q.device.type}"
        reason = _unavailable_reason()
        if reason is not None:
            return reason
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"computes in bfloat16, float16, not in {q.dtype}"
        capability = torch.cuda.get_device_capability(q.device)
        if capability < (8, 0):
            return f"needs compute capability 8.0, got {capability[0]}.{capability[1]}"
        if q.shape[-1] % 8:
            return f"needs a head dim that is a multiple of 8, got {q.shape[-1]}"
        return flash2_unsupported_reason(q.shape[-1], masked, capability)

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        q, k, v = (vectors(x).transpose(1, 2) for x in (q, k, v))
        results = _call(_interface()._flash_attn_forward, q=q, k=k, v=v, return_softmax=False, **_options(args))
        # 2.7 and later return (o, lse, probabilities, state), earlier ones padded copies of q, k, v, o in between.
        o, lse = (results[0], results[1]) if len(results) == 4 else (results[0], results[5])
        return o.transpose(1, 2), lse[..., : q.shape[1]]

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = (vectors(x.to(q.dtype)).transpose(1, 2) for x in (do, q, k, v, o))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _call(
            _interface()._flash_attn_backward,
            **{"dout": do, "q": q, "k": k, "v": v, "out": o, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv},
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=None,
            **_options(args),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _options(args: AttentionArgs) -> dict[str, Any]:
    """Return the options of both functions, with the names of all supported releases."""
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


def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


@cache
def _unavailable_reason() -> str | None:
    """Return why the package cannot be used, or None. It may be installed but built for another torch or CUDA."""
    if importlib.util.find_spec("flash_attn") is None:
        return "is not installed (pip install mllm-seqpar[flash])"
    try:
        interface = _interface()
    except (ImportError, OSError) as error:
        return f"is installed but cannot be imported ({error})"
    if not hasattr(interface, "_flash_attn_forward") or not hasattr(interface, "_flash_attn_backward"):
        return "is installed in a release without the low-level functions of 2.5 to 2.8"
    return None
