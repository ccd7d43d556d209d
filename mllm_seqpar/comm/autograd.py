"""Differentiable collectives. They return gradients of the SUM of the losses of all ranks.

With this convention each backward pass is the adjoint of its forward pass, and a gradient that is averaged over the
group (what DDP and FSDP do) is the gradient of the loss that every rank reports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Communicator


class _GatherShards(torch.autograd.Function):
    """Forward: x_r -> (x_0, ..., x_{n-1}) on every rank. Backward: dx_r = sum over ranks of their gradient of x_r.

    Each rank sends (n - 1) |x| elements in either direction. Nothing is saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> tuple[Tensor, ...]:
        ctx.comm = comm
        parts = comm.all_gather(x)
        return tuple(part.clone() if part.data_ptr() == x.data_ptr() else part for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Sent and summed in float32, because a sum of n terms in bf16 would lose digits of the terms.
        wide = [g.float() if g.element_size() < 4 else g for g in grads]
        return ctx.comm.reduce_scatter(wide).to(grads[0].dtype), None


class _GroupSum(torch.autograd.Function):
    """Forward: x_r -> sum of all ranks' x. Backward: dx = n * g, because the loss of every rank contains the sum.

    Each rank computes the same loss from the same sum, so g is the same on every rank and its sum needs no transfer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.size = comm.size
        return comm.all_reduce(x, "loss")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


def gather_shards(x: Tensor, comm: Communicator) -> tuple[Tensor, ...]:
    """Return all ranks' x, by rank; x has the same shape on every rank. Backward sums the gradients over ranks."""
    if comm.size == 1:
        return (x,)
    return _GatherShards.apply(x, comm)


def group_sum(x: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of x over the group; for numbers that enter a loss that every rank reports."""
    if comm.size == 1:
        return x
    return _GroupSum.apply(x, comm)
