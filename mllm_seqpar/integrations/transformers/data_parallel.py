"""Several groups of ranks under one FSDP2 or DDP: every parameter takes part in every step, on every rank.

FSDP2 gathers the parameters of a module when it runs, and DDP reduces gradients once they exist on all ranks: a rank
that skips a module, or a parameter, stalls the others. The groups of one job have different batches, so before a pass
encodes frames, all ranks that reduce gradients together agree on whether any of them has frames, and of which kind.

FSDP2 is found by the classes of its modules. A model does not refer to the DDP that wraps it, but while DDP's forward
runs, torch does (it uses this to compile such models).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mllm_seqpar._compat import active_ddp
from mllm_seqpar.errors import AgreementError


def agree_on_frames(
    model: nn.Module, runs: int, pixels: bool, features: tuple[int, int] | None
) -> tuple[int, tuple[int, int] | None]:
    """Return how often the vision tower must run in this pass, and the shape of features; the same for all groups.

    Without FSDP2 and DDP, the arguments are returned.

    Args:
        model: the patched model.
        runs: how often this rank's group would run the tower; with features, 1 if there are any.
        pixels: whether the caller passed pixels, perhaps of no frame.
        features: (tokens, width) if the caller passed features, perhaps of no frame.

    Raises:
        AgreementError: on all ranks, if one passes pixels and another one features.
    """
    groups, device, at_least = _reducing_groups(model)
    if not groups:
        return max(runs, at_least), features
    numbers = torch.tensor([runs, pixels, features is not None, *(features or (0, 0))], device=device)
    for group in groups:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    runs, any_pixels, any_features, tokens, width = numbers.tolist()
    if any_pixels and any_features:
        raise AgreementError(
            "some ranks under the same FSDP2 or DDP pass pixels and others pass features, so that only some run the "
            "vision tower; pass one kind in all groups of a step"
        )
    return max(runs, at_least), (tokens, width) if any_features else None


def _reducing_groups(model: nn.Module) -> tuple[list[Any], str | torch.device, int]:
    """Return the process groups that connect the ranks of FSDP2 or DDP, their device, and the fewest runs."""
    if not dist.is_initialized():
        return [], "cpu", 0
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
        # One FSDP unit that is gathered already has no mesh to ask, so assume that some rank has a frame.
        return ([], "cpu", 1) if mesh is None else (mesh.get_all_groups(), mesh.device_type, 0)
    ddp = _reducing_ddp()
    if ddp is None:
        return [], "cpu", 0
    may_skip = ddp.find_unused_parameters and not ddp.static_graph
    groups = [] if _may_have_ended(ddp) else [ddp.process_group]
    return groups, next(ddp.parameters()).device, 0 if may_skip else 1


def _reducing_ddp() -> DistributedDataParallel | None:
    """Return the DDP whose forward runs, if the gradients of this pass are reduced."""
    ddp = active_ddp()
    return ddp if ddp is not None and torch.is_grad_enabled() and ddp.require_backward_grad_sync else None


def _may_have_ended(ddp: DistributedDataParallel) -> bool:
    """Return whether other ranks may have run out of batches, within `ddp.join()`: they answer to no more than DDP."""
    return ddp._join_config.enable


class _TakePart(torch.autograd.Function):
    """Forward: x, parameters -> x. Backward: zero gradients for the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shapes = [p.shape for p in parameters]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros(()).expand(shape) for shape in ctx.shapes)


def with_accumulated_gradients(x: Tensor, model: nn.Module) -> Tensor:
    """Return `x`, through which parameters that have a gradient on any rank of DDP take part in backward with zero.

    With gradient accumulation, DDP reduces the gradients of all micro-batches in the backward pass of the last one, but
    only if that reaches a parameter on every rank. If no rank has frames in it, and only the visual path is trained, it
    reaches none. All ranks of DDP call this function in a pass in which none of them has frames.
    """
    ddp = _reducing_ddp()
    if ddp is None or _may_have_ended(ddp):
        return x
    trained = [p for p in model.parameters() if p.requires_grad]
    accumulated = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=x.device)
    dist.all_reduce(accumulated, dist.ReduceOp.MAX, group=ddp.process_group)
    return _TakePart.apply(x, *(p for p, some in zip(trained, accumulated.tolist(), strict=True) if some))
