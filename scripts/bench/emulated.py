"""A block kernel that takes its time off the processor: so more ranks than cores can compute and transfer at once.

It keeps the protocol of `mllm_seqpar.kernels.base` in shapes, dtypes and time, not in values: results are zeros. The
executor, the schedules, the merging and the transfers around it are the real ones, and so are the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mllm_seqpar.kernels import registry

NAME = "emulated"
BACKWARD = 2.5
"""Time of a block's backward over its forward: five matrix products against two."""


class EmulatedKernel:
    """Sleeps as long as a processor of `rate` FLOP/s would compute, forward 4 and backward 10 FLOPs per entry."""

    name = NAME

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.seconds = 0.0
        """What was asked of it so far."""

    def unsupported_reason(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        """See `BlockKernel`."""
        return "sleeps on the host, which an accelerator would not wait for" if q.device.type != "cpu" else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`; zeros."""
        start = time.perf_counter()
        results = q.new_zeros(q.shape, dtype=torch.float32), q.new_zeros(q.shape[:3], dtype=torch.float32)
        self._until(start, 4.0, q, k)
        return results

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
        """See `BlockKernel`; zeros."""
        start = time.perf_counter()
        dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
        self._until(start, 4.0 * BACKWARD, q, k)
        return dq, dk, dv

    def _until(self, start: float, flops: float, q: Tensor, k: Tensor) -> None:
        took = flops * q.numel() * k.shape[2] / self.rate
        self.seconds += took
        time.sleep(max(0.0, start + took - time.perf_counter()))


@contextmanager
def registered(kernel: EmulatedKernel) -> Iterator[None]:
    """Lets `kernel="emulated"` be chosen, in this process, inside the context."""
    registry._KERNELS[NAME] = lambda: kernel
    try:
        yield
    finally:
        del registry._KERNELS[NAME]
