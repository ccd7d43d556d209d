"""Emulations of the CUDA operators and of the packages of FlashAttention, for machines without a GPU.

Each function takes and returns what the operator does, by its schema and its source (torch 2.13: attention.cu,
attention_backward.cu, flash_api.cpp, cudnn/MHA.cpp; flash-attn 2.6 and 2.8; hopper/flash_api.cpp of 2.8.3 and of August
2026; flash_attn/cute/interface.py of 4.0.0b10 and b27). It rejects what the operator rejects and returns the same
layouts: a log-sum-exp padded with +inf or with a fourth dim, and NaN where the operator guarantees nothing. This tests
how the kernels adapt the operators; the operators themselves need the GPU tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mllm_seqpar.kernels import flash_attn
from mllm_seqpar.kernels.torch_cuda import POINTER_ALIGNMENT


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1 and x.data_ptr() % POINTER_ALIGNMENT == 0
        assert all(s * x.element_size() % POINTER_ALIGNMENT == 0 for s in x.stride()[:-1])
        assert x.numel() > 0


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, bias: Tensor | None) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(repeat, dim=1).mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return scores if bias is None else scores + bias.double()


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None = None) -> tuple:
    _check(q, k, v)
    assert q.dtype == k.dtype == v.dtype
    if isinstance(q, FakeTensor):  # which has no values to compute from
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    scores = _scores(q, k, scale, causal, bias)
    lse = scores.logsumexp(-1)
    hidden = lse == -torch.inf
    o = torch.softmax(scores, -1) @ v.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    # The operators guarantee nothing for hidden rows.
    return o.masked_fill(hidden.unsqueeze(-1), torch.nan).to(q.dtype), lse.masked_fill(hidden, 0.0).float()


def _backward(do, q, k, v, o, lse, scale: float, causal: bool, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    _check(q, k, v, o, do)
    assert q.dtype == k.dtype == v.dtype == o.dtype == do.dtype and lse.dtype == torch.float32
    if isinstance(q, FakeTensor):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
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
    assert bias is None and compute_log_sumexp and q.shape[0] == k.shape[0] and k.shape[2] > 1 and q.is_contiguous()
    o, lse = _forward(q, k, v, scale, is_causal)
    return o, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], None, None, None


def _cudnn_backward(do, q, k, v, o, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale) -> tuple:
    assert bias is None and q.shape[0] == k.shape[0] and k.shape[2] > 1 and (max_q, max_k) == (q.shape[2], k.shape[2])
    assert all(x.is_contiguous() for x in (do, q, o, lse)) and lse.shape == (*q.shape[:3], 1)
    return _backward(do, q, k, v, o, lse.squeeze(-1), scale, causal)


_OPERATORS = {"flash": (_flash, _flash_backward), "efficient": (_efficient, _efficient_backward)}
_OPERATORS["cudnn"] = (_cudnn, _cudnn_backward)
aten = SimpleNamespace(
    **{f"_scaled_dot_product_{name}_attention": pair[0] for name, pair in _OPERATORS.items()},
    **{f"_scaled_dot_product_{name}_attention_backward": pair[1] for name, pair in _OPERATORS.items()},
)


def _bhsd(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _declaring(required: str, optional: str, function: Callable[[SimpleNamespace], tuple]) -> Callable[..., tuple]:
    """Return a function with arguments of these names; the optional ones are None if they are not passed."""

    def call(*arguments: Any, **named: Any) -> tuple:
        bound = call.__signature__.bind(*arguments, **named)
        bound.apply_defaults()
        return function(SimpleNamespace(**bound.arguments))

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in required.split()]
    parameters += [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in optional.split()]
    call.__signature__ = Signature(parameters)
    return call


def _package_forward(x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    assert getattr(x, "window_size", (-1, -1)) == (-1, -1) and getattr(x, "window_size_left", -1) == -1
    assert getattr(x, "window_size_right", -1) == -1 and getattr(x, "softcap", 0.0) == 0.0 and not x.return_softmax
    return _forward(*_bhsd(x.q, x.k, x.v), x.softmax_scale, x.causal)


def _package_backward(x: SimpleNamespace) -> tuple:
    _fill(x, *_bhsd(x.dout, x.q, x.k, x.v, x.out), x.softmax_lse, x.softmax_scale, x.causal)
    return x.dq, x.dk, x.dv, x.softmax_lse


def _fill(x: SimpleNamespace, *arguments: Any) -> None:
    for into, grad in zip((x.dq, x.dk, x.dv), _backward(*arguments), strict=True):
        assert into.stride(-1) == 1 and into.dtype == grad.dtype
        into.copy_(grad.transpose(1, 2))


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
            "q k v dropout_p softmax_scale causal window_size alibi_slopes return_softmax", "", _forward26
        ),
        _flash_attn_backward=_declaring(
            f"{_BACKWARD} window_size alibi_slopes deterministic", "rng_state", _package_backward
        ),
    ),
    "2.8": SimpleNamespace(  # as 2.7 and 2.8 declare it
        _flash_attn_forward=_declaring(
            f"q k v dropout_p softmax_scale causal {_WINDOW28} return_softmax", "", _forward28
        ),
        _flash_attn_backward=_declaring(f"{_BACKWARD} {_WINDOW28} deterministic", "rng_state", _package_backward),
    ),
}

_OPTIONS3 = "int window_size_left=-1, int window_size_right=-1"
_FORWARD3 = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    f"Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, {_OPTIONS3}, int attention_chunk=0, "
    "float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_BACKWARD3 = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    f"float? softmax_scale=None, bool is_causal=False, {_OPTIONS3}, float softcap=0.0, bool deterministic=False, "
    "int sm_margin=0) -> "
)
FLASH_ATTN_3 = {
    "3, 2.8.3": f"{_BACKWARD3}(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "3, 2026": f"{_BACKWARD3}(Tensor, Tensor, Tensor, Tensor, Tensor)",
}
"""The backward operators of two releases of FlashAttention 3."""


@contextmanager
def flash_attn_3(release: str) -> Iterator[None]:
    """Register the operators of a release of FlashAttention 3 for all devices, with its schemas."""

    def arguments(operator: Any, values: tuple, named: dict[str, Any]) -> SimpleNamespace:
        declared = operator.default._schema.arguments
        defaults = {x.name: x.default_value for x in declared}
        return SimpleNamespace(**defaults | dict(zip(defaults, values, strict=False)) | named)

    def forward(*values: Any, **named: Any) -> tuple:
        x = arguments(torch.ops.flash_attn_3.fwd, values, named)
        assert x.num_splits in (0, 1) and (x.window_size_left, x.window_size_right, x.softcap) == (-1, -1, 0.0)
        assert x.k_new is None and x.cu_seqlens_q is None and x.attention_chunk == 0
        o, lse = _forward(*_bhsd(x.q, x.k, x.v), x.softmax_scale, x.is_causal)
        o = o.transpose(1, 2) if x.out is None else x.out.copy_(o.transpose(1, 2))
        return o, lse, lse.new_empty(0), lse.new_empty(0)

    def backward(*values: Any, **named: Any) -> tuple:
        x = arguments(torch.ops.flash_attn_3.bwd, values, named)
        assert (x.window_size_left, x.window_size_right, x.softcap) == (-1, -1, 0.0) and x.softmax_lse.is_contiguous()
        _fill(x, *_bhsd(x.dout, x.q, x.k, x.v, x.out), x.softmax_lse, x.softmax_scale, x.is_causal)
        gradients = (x.dq, x.dk, x.dv) if len(torch.ops.flash_attn_3.bwd.default._schema.returns) == 8 else ()
        return (*gradients, *(x.softmax_lse.clone() for _ in range(5)))

    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        library.define(_FORWARD3)
        library.define(FLASH_ATTN_3[release])
        library.impl("fwd", forward, "CompositeExplicitAutograd")
        library.impl("bwd", backward, "CompositeExplicitAutograd")
        yield


def _forward4(results: int) -> Callable[[SimpleNamespace], tuple]:
    def forward(x: SimpleNamespace) -> tuple:
        assert x.return_lse, "there is no log-sum-exp without it, unless q requires a gradient"
        assert x.window_size_left is None and x.window_size_right is None and x.num_splits in (None, 1)
        o, lse = _forward(*_bhsd(x.q, x.k, x.v), x.softmax_scale, x.causal)
        o = o.transpose(1, 2) if x.out is None else x.out.copy_(o.transpose(1, 2))
        return (o, lse, None, None)[:results]

    return forward


def _backward4(x: SimpleNamespace) -> tuple:
    assert x.window_size_left is None and x.window_size_right is None and x.deterministic is not None
    gradients = _backward(*_bhsd(x.dout, x.q, x.k, x.v, x.out), x.lse, x.softmax_scale, x.causal)
    return tuple(x.transpose(1, 2) for x in gradients)


_LENGTHS = "cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k"
_OPTIONS4 = "softmax_scale causal softcap window_size_left window_size_right"
_CONFIG4 = (
    "m_block_size n_block_size num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB "
    "AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ V_in_regs"
)

FLASH_ATTN_4 = {
    release: SimpleNamespace(
        _flash_attn_fwd=_declaring(
            "q k v",
            f"qv {_LENGTHS} min_seqlen_k page_table {_OPTIONS4} learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap "
            "num_threads num_splits pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse out lse "
            "aux_tensors",
            _forward4(results),
        ),
        _flash_attn_bwd=_declaring(
            "q k v out dout lse",
            f"{_OPTIONS4} {_CONFIG4} {_LENGTHS} deterministic dq dk dv score_mod score_mod_bwd mask_mod aux_tensors",
            _backward4,
        ),
    )
    for release, results in (("4.0.0b10", 2), ("4.0.0b27", 4))
}

PACKAGES = {
    **dict.fromkeys(FLASH_ATTN, ("flash_attn", "flash_attn.flash_attn_interface")),
    **dict.fromkeys(FLASH_ATTN_3, ("flash_attn_3", "flash_attn_interface")),
    **dict.fromkeys(FLASH_ATTN_4, ("flash_attn_4", "flash_attn.cute.interface")),
}
"""The kernel and the module of each release."""


@contextmanager
def installed(*releases: str) -> Iterator[None]:
    """Emulate an installation with these releases and no other FlashAttention package."""
    found = {release: {**FLASH_ATTN, **FLASH_ATTN_4}.get(release, SimpleNamespace()) for release in releases}
    modules = dict.fromkeys([module for _, module in PACKAGES.values()])  # None: there is no such module
    modules |= {PACKAGES[release][1]: functions for release, functions in found.items()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        for release in FLASH_ATTN_3.keys() & releases:
            stack.enter_context(flash_attn_3(release))
        for cached in (flash_attn.unavailable, flash_attn._declared):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield
