"""Adding up the blocks of the same rows, inside a kernel that walks over its keys piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningSoftmax:
    """Output and log-sum-exp of some rows over the keys seen so far, in the dtype of `o`.

    o_BHSD and lse_BHS are filled in place; start from zeros and -inf. Only exponentials of differences from the larger
    log-sum-exp are taken, so nothing overflows at any logit.
    """

    def __init__(self, o: Tensor, lse: Tensor) -> None:
        self.o, self.lse = o, lse

    def add(self, o: Tensor, lse: Tensor) -> None:
        """Merge a block (o, lse) of the same rows. Rows hidden on both sides stay at 0 and -inf."""
        total = torch.logaddexp(self.lse, lse)
        # -inf - (-inf) is NaN: where nothing has been seen yet subtract 0, which leaves the weight exp(-inf) = 0.
        anchor = total.masked_fill(total == -torch.inf, 0.0)
        self.o.mul_(torch.exp(self.lse - anchor).unsqueeze(-1))
        self.o.addcmul_(o.to(self.o.dtype), torch.exp(lse - anchor).unsqueeze(-1))
        self.lse.copy_(total)
