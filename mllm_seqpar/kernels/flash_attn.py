"""Block attention by the flash-attn package (FlashAttention-2, releases 2.5 to 2.8), when it is installed.

The public functions of the package hide the log-sum-exp in backward, so its low-level pair is called. Between releases
that pair changed the names of its arguments and the number of its results, but not their meaning: arguments are passed
by the names that the installed one declares.
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

from .fused import Call, FusedKernel
from .torch_cuda import vectors, why_not_flash2


class FlashAttnKernel(FusedKernel):
    """FlashAttention-2 from the flash-attn package; layout (B, S, H, D) inside. See `BlockKernel`."""

    name = "flash_attn"

    def why_not(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        """Return why the package cannot compute this block, or None."""
        if q.device.type != "cuda":
            return f"needs CUDA tensors, got {q.device.type}"
        obstacle = _why_not_installed()
        if obstacle is not None:
            return obstacle
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"computes in bfloat16, float16, not in {q.dtype}"
        capability = torch.cuda.get_device_capability(q.device)
        if capability < (8, 0):
            return f"needs compute capability 8.0, got {capability[0]}.{capability[1]}"
        if q.shape[-1] % 8:
            return f"needs a head dim that is a multiple of 8, got {q.shape[-1]}"
        return why_not_flash2(q.shape[-1], masked, capability)

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = (vectors(x).transpose(1, 2) for x in (q, k, v))
        results = _call(_interface()._flash_attn_forward, q=q, k=k, v=v, return_softmax=False, **_options(call))
        # 2.7 and later return (o, lse, probabilities, state); before, padded copies of q, k, v, o stood in between.
        o, lse = (results[0], results[1]) if len(results) == 4 else (results[0], results[5])
        return o.transpose(1, 2), lse[..., : q.shape[1]]

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = (vectors(x.to(q.dtype)).transpose(1, 2) for x in (do, q, k, v, o))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _call(
            _interface()._flash_attn_backward,
            **{"dout": do, "q": q, "k": k, "v": v, "out": o, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv},
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=None,
            **_options(call),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _options(call: Call) -> dict[str, Any]:
    """Return the options of both functions, under the names of all supported releases."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size": (-1, -1),
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _call(function: Callable, **arguments: Any) -> Any:
    """Call with the arguments that the function declares, and leave out those that only other releases have."""
    declared = _declared(function)
    missing = [name for name, required in declared.items() if required and name not in arguments]
    if missing:
        raise TypeError(
            f"flash-attn's {getattr(function, '__name__', function)} wants {', '.join(missing)}, which releases 2.5 to "
            f"2.8 do not have; install one of those or choose another kernel"
        )
    return function(**{name: value for name, value in arguments.items() if name in declared})


@cache
def _declared(function: Callable) -> dict[str, bool]:
    """Return a function's argument names, and whether each must be given."""
    # From 2.7 on these are torch custom operators, whose Python signature is (*args, **kwargs).
    original = getattr(function, "_init_fn", function)
    parameters = inspect.signature(original).parameters.values()
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}


def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


@cache
def _why_not_installed() -> str | None:
    """Look for the package once per process; one built for another torch or CUDA is there and yet cannot be used."""
    if importlib.util.find_spec("flash_attn") is None:
        return "is not installed (pip install mllm-seqpar[flash])"
    try:
        interface = _interface()
    except (ImportError, OSError) as error:
        return f"is installed but cannot be imported ({error})"
    if not hasattr(interface, "_flash_attn_forward") or not hasattr(interface, "_flash_attn_backward"):
        return "is installed in a release without the low-level pair of 2.5 to 2.8"
    return None
