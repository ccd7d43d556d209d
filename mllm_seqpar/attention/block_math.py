"""Computation of one attention block, one mask rectangle at a time, and the accumulation of partial results.

Shapes: q, o, do (B, H, S, D); k, v (B, G, T, D), G dividing H; lse (B, H, S) float32. If the items of a batch share
their keys, `fold` makes them rows of one item.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.kernels import BlockKernel, choose_kernel
from mllm_seqpar.kernels.base import delta_of, merge_
from mllm_seqpar.masks import Rectangle

ALL = slice(None)

KEPT_MASK = 1 << 14
"""Entries up to which an expanded mask is kept for all layers of a pass."""

RowIndex = slice | Tensor
"""Rows (or keys) of a tensor: a range, or distinct indices in ascending order."""


def fold(x: Tensor) -> Tensor:
    """(B, H, S, ...) -> (1, H, B * S, ...), contiguous, item after item."""
    return x.transpose(0, 1).reshape(1, x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:]).contiguous()


def unfold(x: Tensor, batch: int) -> Tensor:
    """(1, H, B * S, ...) -> (B, H, S, ...), a view."""
    return x.reshape(x.shape[1], batch, x.shape[2] // batch, *x.shape[3:]).transpose(0, 1)


class FinalRows(NamedTuple):
    """What backward needs of some query rows: q, do, and o and lse merged over all keys.

    The gradients depend on o only through delta = rowsum(do * o), (B, H, S) in float32, which is sent instead of it.
    """

    q: Tensor
    o: Tensor | None
    lse: Tensor
    do: Tensor
    delta: Tensor | None = None

    def with_delta(self) -> FinalRows:
        return self._replace(delta=delta_of(self.do, self.o, self.delta))

    def folded(self) -> FinalRows:
        o, delta = (x if x is None else fold(x) for x in (self.o, self.delta))
        return FinalRows(fold(self.q), o, fold(self.lse), fold(self.do), delta)


class PartialResult:
    """The attention of some query rows over the keys added so far.

    Args:
        q: the query rows, for shape and device.
        dtype: dtype in which o is accumulated.
    """

    def __init__(self, q: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = q, dtype
        self._value: tuple[Tensor, Tensor] | None = None

    @property
    def value(self) -> tuple[Tensor, Tensor]:
        """(o, lse), contiguous. A row without keys so far has o = 0 and lse = -inf."""
        if self._value is None:
            o = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
            wide = torch.promote_types(torch.float32, self._like.dtype)  # lse is wide, as kernels return it
            self._value = o, torch.full(o.shape[:-1], float("-inf"), dtype=wide, device=o.device)
        return self._value

    def add(
        self, o: Tensor, lse: Tensor, batch: slice = ALL, rows: RowIndex | None = ALL, *, borrowed: bool = False
    ) -> None:
        """Merge the result of some batch items and rows (None: all rows) over further keys.

        `borrowed` tensors are copied, because the caller reuses their memory; others may become part of this object.
        """
        if self._value is None and not borrowed and o.shape == self._like.shape:
            self._value = o.to(self._dtype).contiguous(), lse.contiguous()
            return
        whole_o, whole_lse = self._value or self.value
        whole_o, whole_lse = whole_o[batch], whole_lse[batch]
        if isinstance(rows, Tensor):
            some_o, some_lse = whole_o.index_select(2, rows), whole_lse.index_select(2, rows)
            merge_(some_o, some_lse, o, lse)
            whole_o.index_copy_(2, rows, some_o)
            whole_lse.index_copy_(2, rows, some_lse)
        else:
            rows = rows or ALL
            merge_(whole_o[:, :, rows], whole_lse[:, :, rows], o, lse)


class GradientAccumulator:
    """The sum in `dtype` of the gradients of a tensor like `like`, block by block."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = like.shape, like.device, dtype
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The sum so far, contiguous; zeros before the first addition."""
        if self._value is None:
            self._value = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._value

    def add(self, x: Tensor, batch: slice = ALL, rows: RowIndex | None = ALL, *, borrowed: bool = False) -> None:
        """Add x to the given batch items and rows or keys (None: all); `borrowed` as in `PartialResult.add`."""
        if self._value is None and not borrowed and x.shape == self._shape:
            self._value = x.to(self._dtype).contiguous()
        elif isinstance(rows, Tensor):  # indices are distinct, so no order of additions can change the result
            self.value[batch].index_add_(2, rows, x.to(self._dtype))
        else:
            self.value[batch, :, rows or ALL].add_(x)


class PreparedRectangle(NamedTuple):
    """A mask rectangle with the kernel that computes it, for tensors of one dtype, device and head dim.

    Attributes:
        kernel: the block kernel.
        batch, rows: the batch items and query rows.
        keys: the keys; None if they are gathered (`Rectangle.gathered`).
        causal: whether row i attends to keys up to i.
        mask: the expanded mask of a small rectangle of kind "masked".
        rectangle: the rectangle itself.
    """

    kernel: BlockKernel
    batch: slice
    rows: slice
    keys: slice | None
    causal: bool
    mask: Tensor | None
    rectangle: Rectangle


def prepare(
    rectangles: Iterable[Rectangle],
    q: Tensor,
    k: Tensor,
    kernel: str,
    kernels: dict[str, BlockKernel] | None = None,
) -> tuple[PreparedRectangle, ...]:
    """Return the rectangles with their kernels, for blocks with the dtype, device and head dim of q and k.

    Args:
        rectangles: the mask rectangles.
        q, k: tensors like those of the blocks.
        kernel: name of a block kernel, or "auto".
        kernels: what was chosen for other blocks of such tensors, by the kind of a rectangle; extended here.
    """
    chosen: dict[str, BlockKernel] = {} if kernels is None else kernels
    prepared = []
    for x in rectangles:
        causal = x.kind == "causal"
        if x.kind not in chosen:
            chosen[x.kind], _ = choose_kernel(kernel, q, k, causal=causal, masked=x.kind == "masked")
        keys = slice(*x.keys) if x.gathered is None else None
        mask = x.mask(q.device) if x.kind == "masked" and x.entries <= KEPT_MASK else None
        prepared.append(PreparedRectangle(chosen[x.kind], slice(*x.batch), slice(*x.rows), keys, causal, mask, x))
    return tuple(prepared)


class BlockMath(NamedTuple):
    """Attention of blocks by the block kernel `kernel` (a name, or "auto") with the factor `scale` of q k^T."""

    kernel: str
    scale: float

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rectangles: Sequence[PreparedRectangle], out: PartialResult
    ) -> None:
        """Merge the attention of q over the visible keys into `out`."""
        for kernel, batch, rows, keys, causal, mask, rectangle in rectangles:
            index = rectangle.key_index(q.device) if keys is None else keys
            if mask is None and rectangle.kind == "masked":
                mask = rectangle.mask(q.device)
            parts = q[batch, :, rows], k[batch, :, index], v[batch, :, index]
            out.add(*kernel.forward(*parts, scale=self.scale, causal=causal, mask=mask), batch, rows)

    def backward(
        self,
        grads: tuple[GradientAccumulator, GradientAccumulator, GradientAccumulator],
        final: FinalRows,
        k: Tensor,
        v: Tensor,
        rectangles: Sequence[PreparedRectangle],
    ) -> None:
        """Add the block's dq, dk and dv to `grads`."""
        q, o, lse, do, delta = final
        for kernel, batch, rows, keys, causal, mask, rectangle in rectangles:
            index = rectangle.key_index(q.device) if keys is None else keys
            if mask is None and rectangle.kind == "masked":
                mask = rectangle.mask(q.device)
            at = batch, ALL, rows
            parts = kernel.backward(
                do[at],
                q[at],
                k[batch, :, index],
                v[batch, :, index],
                None if o is None else o[at],
                lse[at],
                scale=self.scale,
                causal=causal,
                mask=mask,
                delta=None if delta is None else delta[at],
            )
            for total, part, place in zip(grads, parts, (rows, index, index), strict=True):
                total.add(part, batch, place)
