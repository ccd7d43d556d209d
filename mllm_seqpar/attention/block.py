"""Computing one block, tile by tile, and holding what was computed for a row or a column.

Shapes: q, o, do (B, H, S, D); k, v (B or 1, G, T, D), G dividing H; lse (B, H, S) float32. With one batch item of k and
v, all batch items of q see the same keys (frames of all samples in one list; the mask tells them apart).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import BlockKernel, choose_kernel
from ..kernels.partials import merge_
from ..masks import Tile


class Partial:
    """The attention of some rows over the keys seen so far: o in `dtype` and lse; rows that saw nothing are 0, -inf."""

    def __init__(self, q: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = q, dtype
        self._value: tuple[Tensor, Tensor] | None = None

    @property
    def value(self) -> tuple[Tensor, Tensor]:
        """(o, lse), contiguous; made of zeros and -inf when nothing was added yet."""
        if self._value is None:
            o = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
            wide = torch.promote_types(torch.float32, self._dtype)
            self._value = o, torch.full(o.shape[:-1], float("-inf"), dtype=wide, device=o.device)
        return self._value

    def add(self, o: Tensor, lse: Tensor, batch: slice = slice(None), rows: slice = slice(None)) -> None:
        """Merges the result of some rows over further keys."""
        if self._value is None and o.shape == self._like.shape:
            self._value = o.to(self._dtype).contiguous(), lse.contiguous()
        else:
            mine = self.value
            merge_(mine[0][batch, :, rows], mine[1][batch, :, rows], o, lse)


class Sum:
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

    def add(self, x: Tensor, batch: slice = slice(None), rows: slice = slice(None)) -> None:
        """Adds x to the batch items and rows (or keys) given."""
        if self._value is None and x.shape == self._shape and x.dtype == self._dtype:
            self._value = x.contiguous()
        else:
            self.value[batch, :, rows].add_(x)


class _Part(NamedTuple):
    """A tile cut out of a block: where it lies, its q, k, v, and how its kernel is called."""

    kernel: BlockKernel
    batch: slice
    rows: slice
    key_batch: slice
    keys: slice
    qkv: tuple[Tensor, Tensor, Tensor]
    how: dict[str, Any]


@dataclass(frozen=True)
class BlockMath:
    """How blocks are computed: which kernel, with which scale."""

    kernel: str
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile], out: Partial) -> None:
        """Merges the attention of q over the visible keys into `out`."""
        for part in self._parts(q, k, v, tiles):
            o, lse = part.kernel.forward(*part.qkv, **part.how)
            out.add(o, lse, part.batch, part.rows)

    def backward(
        self,
        grads: tuple[Sum, Sum, Sum],
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        tiles: Iterable[Tile],
    ) -> None:
        """Adds the block's dq, dk, dv to `grads`; o and lse are final, merged over all keys of those rows."""
        dq, dk, dv = grads
        for part in self._parts(q, k, v, tiles):
            do_t, o_t, lse_t = (x[part.batch, :, part.rows] for x in (do, o, lse))
            dq_t, dk_t, dv_t = part.kernel.backward(do_t, *part.qkv, o_t, lse_t, **part.how)
            dq.add(dq_t, part.batch, part.rows)
            dk.add(dk_t, part.key_batch, part.keys)
            dv.add(dv_t, part.key_batch, part.keys)

    def _parts(self, q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile]) -> Iterator[_Part]:
        """Cuts the tiles out of a block, and finds each the kernel that can compute it."""
        for tile in per_batch_item(tiles, q.shape[0], k.shape[0]):
            batch, rows, keys = slice(*tile.batch), slice(*tile.rows), slice(*tile.keys)
            key_batch = batch if k.shape[0] == q.shape[0] else slice(0, 1)
            q_t, k_t, v_t = q[batch, :, rows], k[key_batch, :, keys], v[key_batch, :, keys]
            causal, mask = tile.kind == "causal", tile.mask(q.device)
            kernel, _ = choose_kernel(self.kernel, q_t, k_t, causal=causal, masked=mask is not None)
            how = {"scale": self.scale, "causal": causal, "mask": mask}
            yield _Part(kernel, batch, rows, key_batch, keys, (q_t, k_t, v_t), how)


def per_batch_item(tiles: Iterable[Tile], batch: int, key_batch: int) -> Iterator[Tile]:
    """The tiles as they are, or one batch item at a time when all items share one batch item of keys."""
    for tile in tiles:
        if key_batch == batch:
            yield tile
        else:
            for item in range(*tile.batch):
                yield replace(tile, batch=(item, item + 1))
