"""CPU emulations of the CUDA operators, for machines without a GPU.

Each function takes and returns what the operator does, by its schema and its source (torch 2.13: attention.cu,
attention_backward.cu, flash_api.cpp, cudnn/MHA.cpp; flash-attn 2.6 and 2.8). It rejects what the operator rejects and
returns the same layouts: a log-sum-exp padded with +inf or with a fourth dim, and NaN where the operator guarantees
nothing. This tests how the kernels adapt the operators; the operators themselves need the GPU tests.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.kernels.torch_cuda import POINTER_ALIGNMENT


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1 and x.data_ptr() % POINTER_ALIGNMENT == 0
        strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
        assert all(s * x.element_size() % POINTER_ALIGNMENT == 0 for s in strides)
        assert x.numel() > 0


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, bias: Tensor | None) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(repeat, dim=1).mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores if bias is None else scores + bias.double()


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None = None) -> tuple:
    _check(q, k, v)
    assert q.dtype == k.dtype == v.dtype
    scores = _scores(q, k, scale, causal, bias)
    lse = scores.logsumexp(-1)
    hidden = lse == -torch.inf
    o = torch.softmax(scores, -1) @ v.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    # The operators guarantee nothing for hidden rows.
    return o.masked_fill(hidden.unsqueeze(-1), torch.nan).to(q.dtype), lse.masked_fill(hidden, 0.0).float()


def _backward(do, q, k, v, o, lse, scale: float, causal: bool, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    _check(q, k, v, o, do)
    assert q.dtype == k.dtype == v.dtype == o.dtype == do.dtype and lse.dtype == torch.float32
    groups, repeat = k.shape[1], q.shape[1] // k.shape[1]
    p = torch.exp(_scores(q, k, scale, causal, bias) - lse.double().unsqueeze(-1))
    dp = do.double() @ v.double().repeat_interleave(repeat, dim=1).mT
    ds = p * (dp - (do.double() * o.double()).sum(-1, keepdim=True)) * scale
    dq = ds @ k.double().repeat_interleave(repeat, dim=1)
    dk, dv = (x.unflatten(1, (groups, repeat)).sum(2) for x in (ds.mT @ q.double(), p.mT @ do.double()))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _flash(q, k, v, dropout_p, is_causal, return_debug_mask, *, scale) -> tuple:
    assert q.shape[-1] % 8 == 0 and not (is_causal and q.shape[2] != k.shape[2])
    o, lse = _forward(q, k, v, scale, is_causal)
    return o, lse, None, None, q.shape[2], k.shape[2], None, None, None


def _flash_backward(do, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, p, causal, seed, offset, *, scale) -> tuple:
    assert cum_q is None and cum_k is None and (max_q, max_k) == (q.shape[2], k.shape[2])
    assert lse.shape == q.shape[:3] and lse.is_contiguous()
    return _backward(do, q, k, v, o, lse, scale, causal)


def _check_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is not None:
        assert bias.dtype == q.dtype and bias.shape == (*q.shape[:3], k.shape[2]) and bias.stride(3) == 1
        vector = 16 // q.element_size()
        assert all(s % vector == 0 for s in bias.stride()[:3]) and bias.data_ptr() % POINTER_ALIGNMENT == 0


def _efficient(q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, *, scale) -> tuple:
    assert q.shape[1] == k.shape[1] and compute_log_sumexp
    _check_bias(bias, q, k)
    o, lse = _forward(q, k, v, scale, is_causal, bias)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return o.transpose(1, 2).contiguous().transpose(1, 2), lse, None, None


def _efficient_backward(do, q, k, v, bias, o, lse, seed, offset, p, wanted, is_causal, *, scale) -> tuple:
    assert q.shape[1] == k.shape[1] and wanted == [True, True, True, False]
    _check_bias(bias, q, k)
    rows = q.shape[2]
    if o.element_size() == 2:  # the operator sums do * o itself and assumes one row stride of o
        o = o.as_strided(o.shape, (o.stride(0), o.stride(1), o.shape[1] * o.shape[3], 1))
    assert lse.shape == (*q.shape[:2], -(-rows // 32) * 32) and (lse[..., rows:] == torch.inf).all()
    return *_backward(do, q, k, v, o, lse[..., :rows], scale, is_causal, bias), None


def _cudnn(q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale) -> tuple:
    assert bias is None and k.shape[2] > 1 and all(x.is_contiguous() for x in (q, k, v))
    o, lse = _forward(q, k, v, scale, is_causal)
    return o, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], None, None, None


def _cudnn_backward(do, q, k, v, o, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale) -> tuple:
    assert bias is None and k.shape[2] > 1 and (max_q, max_k) == (q.shape[2], k.shape[2])
    assert all(x.is_contiguous() for x in (do, q, k, v, o, lse)) and lse.shape == (*q.shape[:3], 1)
    return _backward(do, q, k, v, o, lse.squeeze(-1), scale, causal)


_OPERATORS = {"flash": (_flash, _flash_backward), "efficient": (_efficient, _efficient_backward)}
_OPERATORS["cudnn"] = (_cudnn, _cudnn_backward)
aten = SimpleNamespace(
    **{f"_scaled_dot_product_{name}_attention": pair[0] for name, pair in _OPERATORS.items()},
    **{f"_scaled_dot_product_{name}_attention_backward": pair[1] for name, pair in _OPERATORS.items()},
)


def _bhsd(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _declaring(names: str, function: Callable[[SimpleNamespace], tuple]) -> Callable[..., tuple]:
    """Return a function with arguments of these names, of which `rng_state` alone is optional."""

    def call(**arguments: Any) -> tuple:
        bound = call.__signature__.bind(**arguments)
        bound.apply_defaults()
        return function(SimpleNamespace(**bound.arguments))

    defaults = {"rng_state": {"default": None}}
    parameters = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, **defaults.get(n, {})) for n in names.split()]
    call.__signature__ = Signature(parameters)
    return call


def _package_forward(x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    assert getattr(x, "window_size", (-1, -1)) == (-1, -1) and getattr(x, "window_size_left", -1) == -1
    assert getattr(x, "window_size_right", -1) == -1 and getattr(x, "softcap", 0.0) == 0.0 and not x.return_softmax
    return _forward(*_bhsd(x.q, x.k, x.v), x.softmax_scale, x.causal)


def _package_backward(x: SimpleNamespace) -> tuple:
    grads = _backward(*_bhsd(x.dout, x.q, x.k, x.v, x.out), x.softmax_lse, x.softmax_scale, x.causal)
    for into, grad in zip((x.dq, x.dk, x.dv), grads, strict=True):
        assert into.is_contiguous()
        into.copy_(grad.transpose(1, 2))
    return x.dq, x.dk, x.dv, x.softmax_lse


def _forward28(x: SimpleNamespace) -> tuple:
    o, lse = _package_forward(x)
    return o.transpose(1, 2), lse, None, None


def _forward26(x: SimpleNamespace) -> tuple:
    o, lse = _package_forward(x)
    return o.transpose(1, 2), x.q, x.k, x.v, o, lse, None, None  # padded copies among the results


_BACKWARD = "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal"
_WINDOW28 = "window_size_left window_size_right softcap alibi_slopes"

FLASH_ATTN = {
    "2.6": SimpleNamespace(  # as 2.5 and 2.6 declare the low-level pair
        _flash_attn_forward=_declaring(
            "q k v dropout_p softmax_scale causal window_size alibi_slopes return_softmax", _forward26
        ),
        _flash_attn_backward=_declaring(
            f"{_BACKWARD} window_size alibi_slopes deterministic rng_state", _package_backward
        ),
    ),
    "2.8": SimpleNamespace(  # as 2.7 and 2.8 declare it
        _flash_attn_forward=_declaring(f"q k v dropout_p softmax_scale causal {_WINDOW28} return_softmax", _forward28),
        _flash_attn_backward=_declaring(f"{_BACKWARD} {_WINDOW28} deterministic rng_state", _package_backward),
    ),
}
