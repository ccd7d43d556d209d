"""Merging partial attention results (o, lse): associative, commutative, and safe for rows that see nothing.

l = logaddexp(l1, l2), o = exp(l1 - l) o1 + exp(l2 - l) o2. Both -inf: o = 0, l = -inf. The exponentials are of numbers
that are never positive, so nothing overflows however large the logits are.

Shapes: o (..., S, D), lse (..., S) float32, natural logarithm.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Merges (o_new, lse_new) into (o, lse) in place; o keeps its dtype, the arithmetic is at least float32."""
    total = torch.logaddexp(lse, lse_new)
    # exp(-inf - (-inf)) would be NaN: measure from 0 where the row has seen nothing at all
    weight = torch.exp(lse_new - total.masked_fill(total == float("-inf"), 0.0)).unsqueeze(-1)
    if o.dtype in (torch.float32, torch.float64):
        # the two weights sum to 1, so o + w (o_new - o), one pass over o
        o.lerp_(o_new.to(o.dtype), weight.to(o.dtype))
    else:
        o.copy_(torch.lerp(o.float(), o_new.float(), weight))
    lse.copy_(total)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(o1, l1), (o2, l2) -> their merge as new tensors; o has the wider of the two dtypes."""
    dtype = torch.promote_types(first[0].dtype, second[0].dtype)
    o, lse = first[0].to(dtype, copy=True), first[1].clone()
    merge_(o, lse, *second)
    return o, lse
