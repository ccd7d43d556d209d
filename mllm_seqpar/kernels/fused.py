"""Kernels that call a fused operator: their base class (grouped heads, masks and empty blocks), and that of the CPU.

A fused operator attends (B, H, S, D) to (B, G, T, D). It may crash on empty blocks, leave hidden rows undefined, or
require equal numbers of heads or an additive bias. `FusedKernel` turns every block into calls that any operator
handles, so that a new operator needs two short methods only.

* Not causal: the R = H / G query heads of a KV head are folded into rows, (B, H, S, D) -> (B, G, R * S, D). No key is
  expanded, and rows are independent, so this is the same attention.
* Causal with G < H: the operator's own grouping if it has one, otherwise one call for each of the R heads of a group.
* Intervals are cut into rectangles (`rectangles`) without a mask, causal squares and masked ones, whose additive bias
  is built for a bounded number of rows and keys at a time; these pieces are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.masks.intervals import Intervals

from . import base
from .base import merge_
from .rectangles import Rectangle, rectangles_of

ALL = slice(None)

KEPT_MASK = 1 << 14
"""Expanded masks of up to this many entries are kept for all layers of a pass."""

BIAS_ALIGNMENT = 16
"""The distance of the rows of a bias is a multiple of this many entries: the CUDA operators read it in vectors."""


class AttentionArgs(NamedTuple):
    """Arguments of one call of an operator: at most one of `causal` and `bias` (B or 1, 1, S, T) is set."""

    scale: float
    causal: bool = False
    bias: Tensor | None = None


class FusedKernel:
    """A `BlockKernel` around a fused operator.

    Attributes:
        grouped_causal: True if the operator itself takes G < H KV heads.
        mask_entries, mask_keys: entries of a bias, and keys, that are computed at once with a mask.
        operator_dtype: dtype of the operator's inputs; None for that of q.
        converted_keys: the number of keys that are converted to that dtype at once; None: all.
    """

    name = ""
    grouped_causal = True
    mask_entries = 1 << 20
    mask_keys = 1024
    call_entries = 0
    operator_dtype: torch.dtype | None = None
    converted_keys: int | None = None

    def unsupported_reason(self, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> str | None:
        raise NotImplementedError

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Return (o, lse (B, H, S)) for at least one row and one key; the o of hidden rows may have any value."""
        raise NotImplementedError

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) for at least one row and one key; lse is contiguous, float32, without -inf."""
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, intervals: Intervals | None = None
    ) -> tuple[Tensor, Tensor]:
        if not (q.numel() and k.numel()):  # the operators may fail for a block without rows or keys
            return base.empty_forward(q)
        groups = k.shape[1]
        limit = self.converted_keys
        if intervals is None and (limit is None or k.shape[2] <= limit or q.dtype is self.operator_dtype):
            rows = q if q.shape[1] == groups else q.reshape(q.shape[0], groups, -1, q.shape[3])  # `fold_heads`
            o, lse = self._run_forward(rows, k, v, AttentionArgs(scale))
            # The layout of the log-sum-exp differs between operators: it may have no view with unfolded heads.
            lse = lse.contiguous()
            return (o, lse) if rows is q else (o.reshape(q.shape), lse.view(q.shape[:3]))
        pieces = self._pieces(q, k, intervals)
        if len(pieces) == 1 and pieces[0].kind != "full" and pieces[0].is_whole(q.shape[2], k.shape[2]):
            return self._forward_piece(pieces[0], intervals, q, k, v, scale)
        o, lse = base.empty_forward(q)
        done: dict[int | None, int] = {}  # by first batch item: no row from here on has a result
        for piece in pieces:
            at, of_keys = (piece.batch, ALL, piece.rows), (piece.batch, ALL, piece.keys)
            some = q[at], k[of_keys], v[of_keys]
            if piece.kind == "full":
                part = self.forward(*some, scale=scale)
            else:
                part = self._forward_piece(piece, intervals, *some, scale)
            if piece.rows.start >= done.get(piece.batch.start, 0):
                o[at], lse[at] = part
            else:
                merge_(o[at], lse[at], *part)
            done[piece.batch.start] = max(piece.rows.stop, done.get(piece.batch.start, 0))
        return o, lse

    def backward(
        self, rows: base.FinalRows, k: Tensor, v: Tensor, *, scale: float, intervals: Intervals | None = None
    ) -> base.Gradients:
        q, o, lse, do, delta = rows
        if not (q.numel() and k.numel()):
            return base.empty_backward(q, k, v)
        if o is None:
            assert delta is not None
            o = base.output_with_row_sums(do, delta, self.operator_dtype or q.dtype)
        lse = lse.float()
        limit = self.converted_keys
        if intervals is None and (limit is None or k.shape[2] <= limit or q.dtype is self.operator_dtype):
            return self._backward_folded(do, q, k, v, o, lse, AttentionArgs(scale))
        pieces = self._pieces(q, k, intervals)
        if len(pieces) == 1 and pieces[0].is_whole(q.shape[2], k.shape[2]):
            return self._backward_piece(pieces[0], intervals, do, q, k, v, o, lse, scale)
        dq, dk, dv = base.empty_backward(q, k, v)
        for piece in pieces:
            at, of_keys = (piece.batch, ALL, piece.rows), (piece.batch, ALL, piece.keys)
            part = self._backward_piece(piece, intervals, do[at], q[at], k[of_keys], v[of_keys], o[at], lse[at], scale)
            for total, index, grad in zip((dq, dk, dv), (at, of_keys, of_keys), part, strict=True):
                total[index] += grad
        return dq, dk, dv

    def _pieces(self, q: Tensor, k: Tensor, intervals: Intervals | None) -> Sequence[Rectangle]:
        """Return what is computed one after another: the rectangles of the intervals, cut so that each bias and each
        converted copy is bounded. Those of intervals are made once for all layers."""
        repeat = q.shape[1] // k.shape[1]
        key = "pieces", self.name, q.dtype, repeat
        if intervals is not None and key in intervals.kept:
            made: Sequence[Rectangle] = intervals.kept[key]
            return made
        length = q.shape[2]
        converted = k.shape[2] if self.converted_keys is None or q.dtype is self.operator_dtype else self.converted_keys
        if intervals is None:
            return list(_cut(Rectangle(ALL, slice(0, length), slice(0, k.shape[2])), length, converted))
        pieces = list[Rectangle]()
        for rectangle in rectangles_of(intervals):
            row_step, key_step, width = length, converted, rectangle.keys.stop - rectangle.keys.start
            if rectangle.kind == "masked":
                key_step = self.mask_keys
                row_step = max(1, self.mask_entries // (repeat * min(width, key_step)))
            rows = rectangle.rows.stop - rectangle.rows.start
            if rectangle.kind == "causal" or (rows <= row_step and width <= key_step):
                pieces.append(rectangle)
            else:
                pieces += _cut(rectangle, row_step, key_step)
        intervals.kept[key] = pieces
        return pieces

    def _forward_piece(
        self, piece: Rectangle, intervals: Intervals | None, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of a causal or masked piece, given its rows and keys."""
        heads, groups = q.shape[1], k.shape[1]
        if piece.kind == "causal":
            args = AttentionArgs(scale, causal=True)
            if self.grouped_causal or heads == groups:
                o, lse = self._run_forward(q, k, v, args)
                return o, lse.contiguous()
            parts = [self._run_forward(q_head, k, v, args) for q_head in _by_head_of_group(q, k)]
            o, lse = (torch.stack(part, dim=2).flatten(1, 2) for part in zip(*parts, strict=True))
            return o, lse
        mask = _mask(piece, intervals, q.device)
        args = AttentionArgs(scale, bias=self._bias(mask, q, groups))
        o, lse = self._run_forward(q.reshape(q.shape[0], groups, -1, q.shape[3]), k, v, args)
        o, lse = o.reshape(q.shape), lse.contiguous().view(q.shape[:3])
        hidden = ~mask.any(dim=-1).unsqueeze(1)
        return o.masked_fill(hidden.unsqueeze(-1), 0.0), lse.masked_fill(hidden, -torch.inf)

    def _backward_piece(
        self,
        piece: Rectangle,
        intervals: Intervals | None,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        scale: float,
    ) -> base.Gradients:
        """Return (dq, dk, dv) of a piece, given its rows and keys."""
        if piece.kind == "full":
            return self._backward_folded(do, q, k, v, o, lse, AttentionArgs(scale))
        if piece.kind == "masked":
            # Only a mask can leave a row without keys. It has no log-sum-exp that the operator could subtract.
            args = AttentionArgs(scale, bias=self._bias(_mask(piece, intervals, q.device), q, k.shape[1]))
            return self._backward_folded(do, q, k, v, o, base.safe_lse(lse), args)
        args = AttentionArgs(scale, causal=True)
        if self.grouped_causal or q.shape[1] == k.shape[1]:
            return self._run_backward(do, q, k, v, o, lse.contiguous(), args)
        dqs, (_, dk, dv) = [], base.empty_backward(q, k, v)
        for do_head, q_head, o_head, lse_head in zip(*(_by_head_of_group(x, k) for x in (do, q, o, lse)), strict=True):
            dq, dk_part, dv_part = self._run_backward(do_head, q_head, k, v, o_head, lse_head.contiguous(), args)
            dqs.append(dq)
            dk += dk_part
            dv += dv_part
        return torch.stack(dqs, dim=2).flatten(1, 2), dk, dv

    def _backward_folded(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) with the query heads of a KV head as rows."""
        shape, groups = q.shape, k.shape[1]
        if shape[1] != groups:
            do, q, o, lse = [x.reshape(shape[0], groups, -1, *x.shape[3:]) for x in (do, q, o, lse)]  # `fold_heads`
        dq, dk, dv = self._run_backward(do, q, k, v, o, lse.contiguous(), args)
        return dq.reshape(shape), dk, dv

    def _bias(self, mask: Tensor, q: Tensor, groups: int) -> Tensor:
        """Bool (B, S, T) -> additive (B, 1, R * S, T) for folded rows: -inf for hidden entries, aligned row strides."""
        batch, rows, keys = mask.shape
        repeat = q.shape[1] // groups
        width = -(-keys // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
        bias = q.new_zeros(batch, repeat, rows, width, dtype=self.operator_dtype or q.dtype)
        bias[..., :keys].masked_fill_(~mask.unsqueeze(1), -torch.inf)
        return bias.view(batch, 1, repeat * rows, width)[..., :keys]


def _mask(piece: Rectangle, intervals: Intervals | None, device: torch.device) -> Tensor:
    """Return the mask (1, rows, keys) bool of a masked piece; a small one is kept for all layers."""
    assert intervals is not None
    rows, keys = piece.rows, piece.keys
    key = "mask", device, piece.batch.start, rows.start, rows.stop, keys.start, keys.stop
    mask: Tensor | None = intervals.kept.get(key)
    if mask is None:
        mask = intervals.expand(device, piece.batch, rows, keys)
        if mask.numel() <= KEPT_MASK:
            intervals.kept[key] = mask
    return mask


def _by_head_of_group(x: Tensor, k: Tensor) -> list[Tensor]:
    """(B, H, ...) -> R views (B, G, ...), the r-th query head of every KV head."""
    return list(x.unflatten(1, (k.shape[1], -1)).unbind(2))


def _cut(rectangle: Rectangle, row_step: int, key_step: int) -> Iterator[Rectangle]:
    """Yield the parts of a rectangle that have at most so many rows and keys."""
    rows, keys = rectangle.rows, rectangle.keys
    for top in range(rows.start, rows.stop, row_step):
        for left in range(keys.start, keys.stop, key_step):
            some = slice(top, min(top + row_step, rows.stop)), slice(left, min(left + key_step, keys.stop))
            yield Rectangle(rectangle.batch, *some, rectangle.kind)


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpuKernel(FusedKernel):
    """Block attention with torch's fused CPU operator; partial results are float32 for every input dtype.

    Limits of the operator in torch 2.11 to 2.13, and how this kernel handles them:

    * A zero-length q or k crashes the process. `FusedKernel` never passes such blocks on.
    * A row that its mask hides has log-sum-exp 0, and -inf in backward gives NaN. Both are corrected from the mask.
    * A last-dim stride other than 1, heads that do not divide and different batches give wrong results without an
      error. They are checked or copied.
    * For bf16 it returns bf16 partial results and sums dq over the keys in bf16; its fp16 backward is ten times slower.
      Both are computed in float32, a chunk of the keys at a time, so that partial results are float32 too.
    """

    name = "torch_cpu"
    operator_dtype = torch.float32
    converted_keys = 8192
    call_entries = 4096

    def unsupported_reason(self, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> str | None:
        if q.device.type != "cpu":
            return f"needs CPU tensors, got {q.device.type}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"computes in float32, which is less precise than {q.dtype}"
        return None

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        if not q.dtype is k.dtype is torch.float32 or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
            q, k, v = _operands(q, k, v)
        return _forward(q, k, v, is_causal=args.causal, attn_mask=args.bias, scale=args.scale)

    def _run_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, args: AttentionArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = _operands(do, q, k, v, o)
        return _backward(do, q, k, v, o, lse, 0.0, args.causal, attn_mask=args.bias, scale=args.scale)


def _operands(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in float32 with unit stride in the last dim."""
    operands = []
    for x in tensors:
        x = x.float()
        operands.append(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())
    return operands
