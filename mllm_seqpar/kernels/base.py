"""The protocol of block kernels, and the helpers that they share.

A block is the attention of some query rows over some keys. Its output is a partial result: the final result merges the
blocks of a row over all keys, on whichever rank they are. Every kernel follows two rules that make this possible:

* forward returns the normalised output of the block and the natural log-sum-exp of its scores, so that blocks merge;
* backward takes the output and the log-sum-exp of the FINAL, merged rows. The probabilities that it recomputes are then
  those of the whole softmax, and the gradients of blocks add up (FlashAttention-2, section 3.1.2). Of the output it
  needs delta = rowsum(do * o) only, so a rank that computes with the rows of another rank receives delta instead of o.

Shapes: B batch, H query heads, G key/value heads (G divides H), R = H / G, S query rows, T keys, D head dim.
    q, do, o  (B, H, S, D)      k, v  (B, G, T, D)      lse, delta  (B, H, S) float32
    intervals  row s of item b attends to the keys low[b, s] <= j < high[b, s], the same for all heads; (B or 1, S)
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.masks.intervals import Intervals

from .triton_launches import unsupported_device

LOWEST = 1e30
"""Replaces the log-sum-exp of a row that attends to nothing: exp(score - LOWEST) is exactly 0 for every finite
score."""


Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients dq, dk and dv of a block, in this order."""


class FinalRows(NamedTuple):
    """What backward needs of some query rows: q, do, and o and lse merged over all keys.

    Attributes:
        o: None for rows of another rank, whose `delta` is given. `output_with_row_sums` makes an o from it.
        delta: `row_sums(do, o)`; None: a kernel that needs it computes it from o.
    """

    q: Tensor
    o: Tensor | None
    lse: Tensor
    do: Tensor
    delta: Tensor | None = None

    def deltas(self) -> Tensor:
        """Return delta, which is computed from do and o if it is not given."""
        if self.delta is not None:
            return self.delta
        assert self.o is not None
        return row_sums(self.do, self.o)

    def with_delta(self) -> FinalRows:
        return self if self.delta is not None else self._replace(delta=self.deltas())

    def part(self, rows: slice) -> FinalRows:
        q, o, lse, do, delta = self
        at = slice(None), slice(None), rows
        return FinalRows(q[at], None if o is None else o[at], lse[at], do[at], None if delta is None else delta[at])

    def folded(self) -> FinalRows:
        """Return the rows with the batch folded into them (`fold_batch`)."""
        o, delta = (None if x is None else fold_batch(x) for x in (self.o, self.delta))
        return FinalRows(fold_batch(self.q), o, fold_batch(self.lse), fold_batch(self.do), delta)


@runtime_checkable
class BlockKernel(Protocol):
    """Block attention, forward and backward. Implementations are stateless.

    Inputs may be views (slices along S and T, transposed layouts). S and T may be 0. Without `intervals`, every row
    attends to every key. Intervals may have rows that attend to nothing. A kernel that needs another form of the mask
    derives it, and keeps it in `Intervals.kept` for the other layers.
    """

    name: str
    call_entries: int
    """The entries that a kernel computes in the time that one call for a mask rectangle costs; 0 if calls cost little.

    A table whose layers would take many small calls is computed at once, with its invisible entries: on a CPU, a random
    one of 256 rows and 32 frames of 64 keys takes 20 ms instead of 177. One of every third frame, the same for all
    rows, takes 35 ms by layers instead of 58.
    """

    def unsupported_reason(self, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> str | None:
        """Return None if the kernel can compute this block, else the reason as a phrase ("needs CUDA tensors")."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, intervals: Intervals | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the attention of one block.

        Returns:
            o (B, H, S, D) in float32 if the kernel accumulates in it, else in q.dtype; lse (B, H, S), contiguous, in
            float32 (float64 for float64 inputs). A row that attends to nothing has o = 0 and lse = -inf.
        """
        ...

    def backward(
        self, rows: FinalRows, k: Tensor, v: Tensor, *, scale: float, intervals: Intervals | None = None
    ) -> Gradients:
        """Compute the part of the gradients that this block contributes.

        o and do are in q.dtype or float32. Rows with lse = -inf have a zero dq and add exact zeros to dk and dv.

        Returns:
            dq (B, H, S, D), dk and dv (B, G, T, D), in float32 if the kernel accumulates in it, else in q.dtype.
        """
        ...


def row_sums(do: Tensor, o: Tensor) -> Tensor:
    """Return delta (B, H, S) = rowsum(do * o), contiguous, in float32 (float64 if do or o is)."""
    wide = torch.promote_types(torch.promote_types(do.dtype, o.dtype), torch.float32)
    return do.to(wide, copy=True).mul_(o).sum(dim=-1)


def output_with_row_sums(do: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an o (B, H, S, D) in `dtype` with rowsum(do * o) = delta, for operators that take o and no delta.

    In each row, only two elements of o are not 0. Where do is largest, o is delta over it, rounded to `dtype`. Where do
    is largest in the other half of the row, o makes up for that rounding. The row sum is therefore as exact in 16 bits
    as delta itself (do * delta / |do|^2 is not, if do is constant or has outliers), and as nothing is squared, rows of
    any magnitude keep theirs. A row of zeros gives zeros.
    """
    if do.is_cuda and unsupported_device(do.device) is None:
        return torch.ops.mllm_seqpar.output_with_row_sums(do, delta, dtype)
    width = do.shape[-1]
    do = F.pad(do, (0, 1)) if width % 2 else do
    size, index = do.unflatten(-1, (2, -1)).abs().max(dim=-1)
    index[..., 1] += do.shape[-1] // 2
    index = torch.where(size[..., :1] < size[..., 1:], index.flip(-1), index)
    at = do.gather(-1, index).to(dtype).to(delta.dtype)
    first, second = at.masked_fill(at == 0, 1.0).unbind(-1)
    o_first = (delta / first).to(dtype)
    limit = torch.finfo(dtype).max
    o_second = ((delta - first * o_first) / second).clamp(-limit, limit).to(dtype)
    o = torch.zeros(do.shape, dtype=dtype, device=do.device)
    return o.scatter_(-1, index, torch.stack((o_first, o_second), dim=-1))[..., :width]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over keys: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_forward(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of rows that attend to nothing: zeros (B, H, S, D) and -inf (B, H, S)."""
    dtype = torch.promote_types(q.dtype, torch.float32)  # `accumulator`, without a call
    return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)


def empty_backward(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Return zero gradients (dq, dk, dv) of a block without rows or without keys."""
    dtype = accumulator(q.dtype)
    return q.new_zeros(q.shape, dtype=dtype), k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)


def fold_batch(x: Tensor) -> Tensor:
    """(B, H, S, ...) -> (1, H, B * S, ...), contiguous: the rows of all items become rows of one, item after item.

    Rows are independent, so this is the same attention to keys that the items share.
    """
    return x.transpose(0, 1).reshape(1, x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:]).contiguous()


def unfold_batch(x: Tensor, batch: int) -> Tensor:
    """(1, H, B * S, ...) -> (B, H, S, ...), a view: the inverse of `fold_batch`."""
    return x.reshape(x.shape[1], batch, x.shape[2] // batch, *x.shape[3:]).transpose(0, 1)


def fold_heads(x: Tensor, groups: int) -> Tensor:
    """(B, H, S, ...) -> (B, G, H/G * S, ...): the query heads that share a KV head become rows of one head.

    Unless the block is causal, rows are independent, so this is the same attention without expanding keys.
    """
    batch, heads, rows = x.shape[:3]
    return x if heads == groups else x.reshape(batch, groups, heads // groups * rows, *x.shape[3:])


def unfold_heads(x: Tensor, heads: int) -> Tensor:
    """(B, G, H/G * S, ...) -> (B, H, S, ...): the inverse of `fold_heads`."""
    batch, groups, rows = x.shape[:3]
    return x if heads == groups else x.reshape(batch, heads, rows * groups // heads, *x.shape[3:])


def safe_lse(lse: Tensor) -> Tensor:
    """Return lse with -inf replaced, so that exp(score - lse) is 0 in those rows and not NaN."""
    return lse.masked_fill(lse == -torch.inf, LOWEST)


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Merge partial results (o, lse) of the same rows in place: add (o_new, lse_new) to (o, lse).

    l = logaddexp(l1, l2), o = exp(l1 - l) o1 + exp(l2 - l) o2. No exponent is positive, so nothing overflows for any
    logit. The merge is associative and commutative. Where both l1 and l2 are -inf (rows that attend to nothing), o = 0
    and l = -inf; the initial value of (o, lse) is therefore zeros and -inf.

    Shapes: o (B, H, S, D), lse (B, H, S). o keeps its dtype, and the arithmetic is at least float32.
    """
    if o.is_cuda and lse.dtype == torch.float32 and unsupported_device(o.device) is None:
        torch.ops.mllm_seqpar.merge_(o, lse, o_new, lse_new)
        return
    total = torch.logaddexp(lse, lse_new)
    # -inf - (-inf) would be NaN. For rows that have attended to nothing subtract 0, which gives the weight exp(-inf) =
    # 0.
    weight = torch.exp(lse_new - total.masked_fill(total == -torch.inf, 0.0)).unsqueeze(-1)
    # The two weights sum to 1, so this is o + weight (o_new - o), in one pass over o.
    if o.dtype in (torch.float32, torch.float64):
        o.lerp_(o_new.to(o.dtype), weight.to(o.dtype))
    else:
        o.copy_(torch.lerp(o.float(), o_new.float(), weight))
    lse.copy_(total)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the merge of (o1, l1) and (o2, l2) as new tensors; o has the wider of the two dtypes."""
    dtype = torch.promote_types(first[0].dtype, second[0].dtype)
    o, lse = first[0].to(dtype, copy=True), first[1].clone()
    merge_(o, lse, *second)
    return o, lse
