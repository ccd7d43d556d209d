"""Some of a rank's rows: those that see any key of another rank, the only ones that need to travel to it."""

from __future__ import annotations

import torch
from torch import Tensor


class RowSubset:
    """Row numbers in ascending order, (r,) int64.

    Attributes:
        index: the numbers, on the CPU.
        count: how many.
    """

    def __init__(self, index: Tensor) -> None:
        self.index, self.count = index, index.numel()
        self._on: dict[torch.device, Tensor] = {}
        first = int(index[0]) if self.count else 0
        consecutive = not self.count or int(index[-1]) - first + 1 == self.count
        self._span = slice(first, first + self.count) if consecutive else None

    def on(self, device: torch.device) -> slice | Tensor:
        """What selects these rows of a tensor on `device`: a slice where they are consecutive."""
        if self._span is not None:
            return self._span
        if device not in self._on:
            self._on[device] = self.index.to(device)
        return self._on[device]

    def of(self, x: Tensor) -> Tensor:
        """x (B, H, S, ...) -> these rows of it, (B, H, r, ...), contiguous."""
        which = self.on(x.device)
        return x[:, :, which].contiguous() if isinstance(which, slice) else x.index_select(2, which)
