"""The log-sum-exp merge of partial results (o, lse) of the same rows: associative and commutative.

l = logaddexp(l1, l2), o = exp(l1 - l) o1 + exp(l2 - l) o2. No exponent is positive, so nothing overflows for any logit.
If both l1 and l2 are -inf (rows that see nothing), o = 0 and l = -inf.

Shapes: o (..., S, D), lse (..., S) float32 (float64 where o is), natural logarithm.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Merge (o_new, lse_new) into (o, lse) in place; o keeps its dtype, the arithmetic is at least float32.

    The initial value of (o, lse) is zeros and -inf.
    """
    total = torch.logaddexp(lse, lse_new)
    # -inf - (-inf) would be NaN. For rows that have seen nothing subtract 0, which gives the weight exp(-inf) = 0.
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
