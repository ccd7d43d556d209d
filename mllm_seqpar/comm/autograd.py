"""Collectives that gradients flow through. The objective of all ranks together is the SUM of their losses.

Under that one rule each backward pass is the plain adjoint of its forward pass, and a gradient averaged over the group
(what DDP and FSDP do) is the gradient of the loss that every rank reports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Communicator


class _GatherShards(torch.autograd.Function):
    """Forward: x_r -> (x_0, ..., x_{n-1}) on every rank. Backward: dx_r = sum over ranks of their gradient of x_r.

    Sent per rank: (n - 1) |x| forward, (n - 1) |x| backward. Saved: nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> tuple[Tensor, ...]:
        ctx.comm = comm
        parts = comm.all_gather(x)
        return tuple(part.clone() if part.data_ptr() == x.data_ptr() else part for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # float32 on the wire: a sum of n terms in bf16 would lose what the parts still had
        wide = [g.float() if g.element_size() < 4 else g for g in grads]
        return ctx.comm.reduce_scatter(wide).to(grads[0].dtype), None


class _GroupSum(torch.autograd.Function):
    """Forward: x_r -> sum of all ranks' x. Backward: dx = n * g, since every rank's loss holds the same sum.

    g is the same number on every rank (each rank computes the same loss from the same sum), so summing it over ranks
    needs no transfer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.size = comm.size
        return comm.all_reduce(x, "loss")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


def gather_shards(x: Tensor, comm: Communicator) -> tuple[Tensor, ...]:
    """x of equal shape on every rank -> all ranks' x, by rank; the backward pass sums gradients over ranks."""
    if comm.size == 1:
        return (x,)
    return _GatherShards.apply(x, comm)


def group_sum(x: Tensor, comm: Communicator) -> Tensor:
    """x -> its sum over the group, the same on every rank; for numbers that end in a loss every rank reports."""
    if comm.size == 1:
        return x
    return _GroupSum.apply(x, comm)
