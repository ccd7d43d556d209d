"""Computing one block, tile by tile, and holding what was computed for a row or a column.

Shapes: q, o, do (B, H, S, D); k, v (B, G, T, D), G dividing H; lse (B, H, S) float32. Batch items that share their keys
are rows of one batch item here: `fold` and `unfold`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.kernels import BlockKernel, choose_kernel
from mllm_seqpar.kernels.merge import merge_
from mllm_seqpar.masks import Rectangle

Places = slice | Tensor
"""Which rows or keys of a tensor: a span, or indices in ascending order, each once."""


def fold(x: Tensor) -> Tensor:
    """(B, H, S, ...) -> (1, H, B * S, ...), contiguous, item after item: batch items that share their keys."""
    return x.transpose(0, 1).reshape(1, x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:]).contiguous()


def unfold(x: Tensor, batch: int) -> Tensor:
    """(1, H, B * S, ...) -> (B, H, S, ...), a view."""
    return x.reshape(x.shape[1], batch, x.shape[2] // batch, *x.shape[3:]).transpose(0, 1)


class PartialResult:
    """The attention of some rows over the keys seen so far: o in `dtype` and lse; rows that saw nothing are 0, -inf."""

    def __init__(self, q: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = q, dtype
        self._value: tuple[Tensor, Tensor] | None = None

    @property
    def value(self) -> tuple[Tensor, Tensor]:
        """(o, lse), contiguous; made of zeros and -inf when nothing was added yet."""
        if self._value is None:
            o = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
            wide = torch.promote_types(torch.float32, self._like.dtype)  # as kernels give it, whatever o is summed in
            self._value = o, torch.full(o.shape[:-1], float("-inf"), dtype=wide, device=o.device)
        return self._value

    def add(self, o: Tensor, lse: Tensor, batch: slice = slice(None), rows: Places = slice(None)) -> None:
        """Merges the result of some rows over further keys."""
        if self._value is None and o.shape == self._like.shape:
            self._value = o.to(self._dtype).contiguous(), lse.contiguous()
            return
        mine = [x[batch] for x in self.value]
        if isinstance(rows, slice):
            merge_(mine[0][:, :, rows], mine[1][:, :, rows], o, lse)
            return
        some = [x.index_select(2, rows) for x in mine]
        merge_(some[0], some[1], o, lse)
        for whole, part in zip(mine, some, strict=True):
            whole.index_copy_(2, rows, part)


class GradientAccumulator:
    """A gradient that adds up over blocks, in `dtype`."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = like.shape, like.device, dtype
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The sum so far, contiguous; zeros when nothing was added yet."""
        if self._value is None:
            self._value = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._value

    def add(self, x: Tensor, batch: slice = slice(None), rows: Places = slice(None)) -> None:
        """Adds x to the batch items and rows (or keys) given."""
        if self._value is None and x.shape == self._shape and x.dtype == self._dtype:
            self._value = x.contiguous()
        elif isinstance(rows, slice):
            self.value[batch, :, rows].add_(x)
        else:  # every index once: one addend to each row, so the sum has no order to depend on
            self.value[batch].index_add_(2, rows, x.to(self._dtype))


class _Part(NamedTuple):
    """A tile cut out of a block: where it lies, its q, k, v, and how its kernel is called."""

    kernel: BlockKernel
    batch: slice
    rows: slice
    keys: Places
    qkv: tuple[Tensor, Tensor, Tensor]
    how: dict[str, Any]


@dataclass(frozen=True)
class BlockMath:
    """How blocks are computed: which kernel, with which scale."""

    kernel: str
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Rectangle], out: PartialResult) -> None:
        """Merges the attention of q over the visible keys into `out`."""
        for part in self._parts(q, k, v, tiles):
            o, lse = part.kernel.forward(*part.qkv, **part.how)
            out.add(o, lse, part.batch, part.rows)

    def backward(
        self,
        grads: tuple[GradientAccumulator, GradientAccumulator, GradientAccumulator],
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        tiles: Iterable[Rectangle],
    ) -> None:
        """Adds the block's dq, dk, dv to `grads`; o and lse are final, merged over all keys of those rows."""
        dq, dk, dv = grads
        for part in self._parts(q, k, v, tiles):
            do_t, o_t, lse_t = (x[part.batch, :, part.rows] for x in (do, o, lse))
            dq_t, dk_t, dv_t = part.kernel.backward(do_t, *part.qkv, o_t, lse_t, **part.how)
            dq.add(dq_t, part.batch, part.rows)
            dk.add(dk_t, part.batch, part.keys)
            dv.add(dv_t, part.batch, part.keys)

    def _parts(self, q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Rectangle]) -> Iterator[_Part]:
        """Cuts the tiles out of a block, and finds each the kernel that can compute it."""
        for tile in tiles:
            batch, rows, keys = slice(*tile.batch), slice(*tile.rows), tile.key_index(q.device)
            q_t, k_t, v_t = q[batch, :, rows], k[batch, :, keys], v[batch, :, keys]
            causal, mask = tile.kind == "causal", tile.mask(q.device)
            kernel, _ = choose_kernel(self.kernel, q_t, k_t, causal=causal, masked=mask is not None)
            how = {"scale": self.scale, "causal": causal, "mask": mask}
            yield _Part(kernel, batch, rows, keys, (q_t, k_t, v_t), how)
