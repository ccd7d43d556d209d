"""Checks of the functional layer's arguments, on this rank and between ranks, before the first transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.sharding import Spans, describe_spans, span_length

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ShapeError unless q is (B, H, s_q, D), k and v (B or 1, G, s_kv, D), of one dtype and device."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ShapeError(f"expected q (B, H, s_q, D) and k, v of one shape (B, G, s_kv, D); got {shapes}")
    if k.shape[0] not in (1, q.shape[0]) or k.shape[3] != q.shape[3]:
        raise ShapeError(f"k and v must have q's head dim, and its batch or a batch of 1; got {shapes}")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key-value heads: no whole multiple; got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ShapeError(
            f"q, k and v must share one dtype and device; got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
            f"{v.dtype} on {v.device}"
        )
    if q.dtype not in _DTYPES:
        raise ShapeError(f"q, k and v must be floating point ({', '.join(map(str, _DTYPES))}); got {q.dtype}")


def check_accumulation(dtype: torch.dtype | str | None) -> None:
    if dtype not in (*_DTYPES, "auto", None):
        raise ConfigError(
            f'accumulate_dtype: {dtype!r} cannot be used; choose "auto", torch.float32, or None for q\'s dtype'
        )


def check_scale(scale: float | None) -> None:
    """Raise ConfigError unless the scale is None or a finite number; a tensor would lose its gradient."""
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale)):
        raise ConfigError(f"scale: {scale!r:.80} is not a finite number; pass a float, or None for head dim ** -0.5")


def check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: {value!r:.80} is not a bool; pass True or False")


def check_mask_type(mask: FrameMask | None) -> None:
    if mask is not None and not isinstance(mask, FrameMask):
        raise MaskError(
            f"mask: expected a FrameMask or None, got {type(mask).__name__}; build one with FrameMask.from_dense (a "
            "table of rows and frames) or FrameMask.from_intervals (the first and the end frame of each row)"
        )


def check_mask(mask: FrameMask, q: Tensor, k: Tensor, frames: Spans) -> None:
    """Raise MaskError unless the mask has q's rows and k holds the keys of these frames."""
    if mask.shape != (q.shape[0], q.shape[2]):
        raise MaskError(f"mask: has (batch, rows) {mask.shape}; this rank's q has {(q.shape[0], q.shape[2])}")
    keys = span_length(frames) * mask.tokens_per_frame
    if keys != k.shape[2]:
        raise MaskError(
            f"mask: of its {mask.total_frames} frames of {mask.tokens_per_frame} tokens this rank holds frames "
            f"{describe_spans(frames)} (frame_range), which means {keys} keys; k has {k.shape[2]}"
        )


GRADIENT_STATES = 3


def gradient_state(*tensors: Tensor) -> int:
    """Return 0 without grad mode, 2 if any of the tensors requires a gradient, else 1."""
    if not torch.is_grad_enabled():
        return 0
    return 2 if any(t.requires_grad for t in tensors) else 1


def has_backward(states: Sequence[int]) -> bool:
    """Return whether there will be a backward pass, given every rank's `gradient_state`.

    Raises:
        AgreementError: some ranks require gradients and others run without grad mode; backward would hang.
    """
    required = 2 in states
    if required and 0 in states:
        without = ", ".join(str(rank) for rank, state in enumerate(states) if state == 0)
        raise AgreementError(
            f"rank {without} of the group runs without gradients (torch.no_grad) where other ranks require them; the "
            "backward pass needs all ranks"
        )
    return required
