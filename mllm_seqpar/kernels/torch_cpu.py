"""Block attention by torch's fused CPU operator (`aten::_scaled_dot_product_flash_attention_for_cpu`).

What the operator gets wrong or leaves open is put right here (measured on torch 2.11 to 2.13):

* zero-length q or k kills the process: such blocks never reach it;
* a row hidden by its mask gets log-sum-exp 0: set to -inf from the mask; in backward -inf gives NaN: replaced;
* a last-dim stride other than 1, heads that do not divide, batches that differ: silently wrong, so checked before;
* bf16 gives bf16 partials and sums dq over keys in bf16, and fp16 backward is ten times slower: both are computed in
  float32, a piece of the keys at a time, which also makes the partial results float32;
* query heads of one key head are folded into rows, which is faster than the operator's own way of grouping;
* masks must be additive floats: they are expanded for a bounded tile of rows x keys only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from mllm_seqpar.kernels import base
from mllm_seqpar.kernels.partials import RunningSoftmax

KEYS_PER_PIECE = 8192
"""Keys converted to float32 at once for 16-bit inputs."""
KEYS_PER_MASK = 1024
MASK_ENTRIES = 1 << 20
"""Keys and entries of an additive mask held at once (4 MiB)."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpuKernel:
    """Block attention by torch's fused CPU operator, float32 partials for every input dtype. See `BlockKernel`."""

    name = "torch_cpu"

    def why_not(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        """Return why the operator cannot compute this block, or None."""
        if q.device.type != "cpu":
            return f"needs CPU tensors, got {q.device.type}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"computes in float32, which is less than {q.dtype}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend; o and lse in float32. See `BlockKernel.forward`."""
        base.check_block(q, k, v, causal=causal, mask=mask)
        if base.is_empty(q, k):
            return base.empty_forward(q)
        if causal:
            o, lse = _forward(_float(q), _float(k), _float(v), is_causal=True, scale=scale)
            return o, lse.contiguous()
        pieces = _pieces(q, k, mask)
        if len(pieces) == 1:
            return _attend(q, k, v, scale, mask)
        o, lse = base.empty_forward(q)
        for rows, keys in pieces:
            part = _attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], scale, _cut(mask, rows, keys))
            RunningSoftmax(o[:, :, rows], lse[:, :, rows]).add(*part)
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        scale: float,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate; float32 gradients. See `BlockKernel.backward`."""
        base.check_block(q, k, v, causal=causal, mask=mask)
        base.check_final(do, q, o, lse)
        if base.is_empty(q, k):
            return base.empty_backward(q, k, v)
        lse = base.safe_lse(lse.float())
        if causal:
            return _backward(*map(_float, (do, q, k, v, o)), lse.contiguous(), 0.0, True, scale=scale)
        pieces = _pieces(q, k, mask)
        if len(pieces) == 1:
            return _differentiate(do, q, k, v, o, lse, scale, mask)
        dq, dk, dv = base.empty_backward(q, k, v)
        for rows, keys in pieces:
            do_rows, q_rows, o_rows, lse_rows = (x[:, :, rows] for x in (do, q, o, lse))
            k_piece, v_piece, mask_piece = k[:, :, keys], v[:, :, keys], _cut(mask, rows, keys)
            dq_part, dk_part, dv_part = _differentiate(
                do_rows, q_rows, k_piece, v_piece, o_rows, lse_rows, scale, mask_piece
            )
            dq[:, :, rows] += dq_part
            dk[:, :, keys] += dk_part
            dv[:, :, keys] += dv_part
        return dq, dk, dv


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the operator on one piece, not causal; return o and lse in float32."""
    groups, heads = k.shape[1], q.shape[1]
    o, lse = _forward(
        _float(base.fold_groups(q, groups)),
        _float(k),
        _float(v),
        attn_mask=_additive(mask, heads // groups),
        scale=scale,
    )
    # The operator's log-sum-exp lies transposed in memory, which no view may unfold.
    lse = base.unfold_groups(lse.contiguous(), heads)
    return base.unfold_groups(o, heads), lse if mask is None else base.hide_rows(lse, mask)


def _differentiate(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator's backward on one piece, not causal; lse has no -inf. Return float32 gradients."""
    groups, heads = k.shape[1], q.shape[1]
    do, q, o = (_float(base.fold_groups(x, groups)) for x in (do, q, o))
    lse = base.fold_groups(lse, groups).contiguous()
    bias = _additive(mask, heads // groups)
    dq, dk, dv = _backward(do, q, _float(k), _float(v), o, lse, 0.0, False, attn_mask=bias, scale=scale)
    return base.unfold_groups(dq, heads), dk, dv


def _float(x: Tensor) -> Tensor:
    """Return x in float32 with unit stride in the last dim."""
    return base.unit_stride(x.float())


def _additive(mask: Tensor | None, repeat: int) -> Tensor | None:
    """Bool (B, S, T) -> float32 (B, 1, repeat * S, T), -inf where hidden, the rows once for each folded head."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    return bias.repeat(1, repeat, 1).unsqueeze(1)


def _cut(mask: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    return None if mask is None else mask[:, rows, keys]


def _pieces(q: Tensor, k: Tensor, mask: Tensor | None) -> list[tuple[slice, slice]]:
    """Return the (rows, keys) to compute one after another, so that no mask or float32 copy outgrows its bound."""
    rows, keys = q.shape[2], k.shape[2]
    if mask is not None:
        entries_per_row = mask.shape[0] * (q.shape[1] // k.shape[1]) * min(keys, KEYS_PER_MASK)
        return list(product(_ranges(rows, max(1, MASK_ENTRIES // entries_per_row)), _ranges(keys, KEYS_PER_MASK)))
    step = keys if q.dtype == torch.float32 else KEYS_PER_PIECE
    return list(product(_ranges(rows, rows), _ranges(keys, step)))


def _ranges(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
