"""Merging partial results of the same rows: associative, commutative, safe for rows that see nothing.

l = logaddexp(l1, l2), o = exp(l1 - l) o1 + exp(l2 - l) o2. Only exponentials of numbers that are never positive are
taken, so nothing overflows at any logit. Both -inf: o = 0, l = -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Merge the block (o_new, lse_new) into (o, lse) in place; o (..., S, D) is float32 or float64, lse is (..., S).

    Rows that have seen nothing yet are zeros and -inf.
    """
    total = torch.logaddexp(lse, lse_new)
    # -inf - (-inf) would be NaN: where nothing has been seen subtract 0, which leaves the weight exp(-inf) = 0.
    weight = torch.exp(lse_new - total.masked_fill(total == -torch.inf, 0.0)).unsqueeze(-1)
    # The two weights sum to 1, so this is o + weight (o_new - o), in one pass over o.
    o.lerp_(o_new.to(o.dtype), weight.to(o.dtype))
    lse.copy_(total)
