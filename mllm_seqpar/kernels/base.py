"""The protocol of block attention kernels and the checks that they share.

One block is the attention of some query rows over some keys. It is not yet the answer: the answer is the merge of the
blocks of a row over all key sets, wherever they live. Two rules make that work, and every kernel keeps them:

* forward gives the block's own normalised output and the natural log-sum-exp of its scores, so that blocks merge;
* backward takes the output and log-sum-exp of the FINAL, merged rows. Then the probabilities that it recomputes are
  those of the whole softmax, and the gradients of blocks simply add up (FlashAttention-2, section 3.1.2).

Shapes: B batch, H query heads, G key/value heads (G divides H), R = H / G, S query rows, T keys, D head dim.
    q, do, o  (B, H, S, D)      k, v  (B, G, T, D)      lse  (B, H, S) float32
    mask  (B or 1, S, T) bool, True = visible, the same for all heads
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mllm_seqpar.errors import ShapeError

LOWEST = 1e30
"""Stands in for the log-sum-exp of a row that sees nothing: exp(score - LOWEST) is exactly 0 for every finite score."""


@runtime_checkable
class BlockKernel(Protocol):
    """Block attention, forward and backward. Implementations hold no state and may be shared.

    Inputs may be views (slices along S and T, transposed layouts). S and T may be 0. `causal` needs S == T, lets row i
    see the keys 0..i, and is never given together with `mask`.
    """

    name: str

    def why_not(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        """Return None when the kernel can compute this block, else the reason as a phrase ("needs CUDA tensors")."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Returns:
            o (B, H, S, D), float32 where the kernel has it and q.dtype otherwise, and lse (B, H, S), float32 (float64
            where q is), contiguous. A row that sees nothing has o = 0 and lse = -inf.

        Raises:
            ShapeError: shapes that do not fit together.
        """
        ...

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
        """Compute this block's share of the gradients, given the final (merged) o and lse of its rows.

        o and do are in q.dtype or float32. Rows with lse = -inf get and give exact zeros.

        Returns:
            dq (B, H, S, D), dk and dv (B, G, T, D): float32 where the kernel has it, the input's dtype otherwise.

        Raises:
            ShapeError: shapes that do not fit together.
        """
        ...


def check_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None) -> None:
    """Raise ShapeError unless q, k, v and mask form one block. Fused operators read past the end when they do not."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ShapeError(
            f"attention needs q (B, H, S, D) and k, v of one shape (B, G, T, D); got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    batch, heads, rows, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim:
        raise ShapeError(f"q and k must agree in batch and head dim; got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ShapeError(f"the {heads} query heads must be a multiple of the {k.shape[1]} key/value heads")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ShapeError(f"q, k and v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ShapeError(f"q, k and v must be on one device; got {q.device}, {k.device}, {v.device}")
    if causal and mask is not None:
        raise ShapeError("causal and mask exclude each other: fold the causal rule into the mask")
    if causal and rows != k.shape[2]:
        raise ShapeError(f"a causal block needs as many keys as rows; got {rows} rows and {k.shape[2]} keys")
    if mask is not None:
        _check_mask(mask, q, k)


def _check_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    rows, keys = q.shape[2], k.shape[2]
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask must be bool, True where a row sees a key; got {mask.dtype}")
    if mask.dim() != 3 or mask.shape[0] not in (1, q.shape[0]) or mask.shape[1:] != (rows, keys):
        raise ShapeError(f"mask must be ({q.shape[0]} or 1, {rows}, {keys}); got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise ShapeError(f"mask must be on {q.device} like q; got {mask.device}")


def check_final(do: Tensor, q: Tensor, o: Tensor, lse: Tensor) -> None:
    """Raise ShapeError unless do, o and lse belong to the rows of q."""
    if do.shape != q.shape or o.shape != q.shape or lse.shape != q.shape[:3]:
        raise ShapeError(
            f"do and o must have q's shape {tuple(q.shape)} and lse its first three sizes; got do {tuple(do.shape)}, "
            f"o {tuple(o.shape)}, lse {tuple(lse.shape)}"
        )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over keys are kept: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_empty(q: Tensor, k: Tensor) -> bool:
    """Tell whether a block has no row or no key, in which case no kernel needs to run (and some must not)."""
    return q.numel() == 0 or k.numel() == 0


def empty_forward(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of rows that see nothing: zeros (B, H, S, D) and -inf (B, H, S)."""
    dtype = accumulator(q.dtype)
    return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)


def empty_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return zero gradients (dq, dk, dv) of a block without rows or without keys."""
    dtype = accumulator(q.dtype)
    return q.new_zeros(q.shape, dtype=dtype), k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)


def unit_stride(x: Tensor) -> Tensor:
    """Return x with last-dim stride 1, copied only if need be: the fused operators assume it, some unchecked."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def fold_groups(x: Tensor, groups: int) -> Tensor:
    """(B, H, S, ...) -> (B, G, H/G * S, ...): the query heads that share a key head become rows of one head.

    Rows know nothing of each other unless the block is causal, so this is the same attention without expanding keys.
    """
    batch, heads, rows = x.shape[:3]
    return x if heads == groups else x.reshape(batch, groups, heads // groups * rows, *x.shape[3:])


def unfold_groups(x: Tensor, heads: int) -> Tensor:
    """(B, G, H/G * S, ...) -> (B, H, S, ...): the inverse of `fold_groups`."""
    batch, groups, rows = x.shape[:3]
    return x if heads == groups else x.reshape(batch, heads, rows * groups // heads, *x.shape[3:])


def safe_lse(lse: Tensor) -> Tensor:
    """Return lse with -inf replaced so that exp(score - lse) is 0 in those rows, not NaN."""
    return lse.masked_fill(lse == -torch.inf, LOWEST)
