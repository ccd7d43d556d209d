"""One optimizer step and one evaluation, exact over micro-batches and data parallel groups.

The objective of a step is the mean over all its target tokens: the sum over groups g and micro-batches m of
c[g, m] * loss[g, m] / C, where loss[g, m] is the model's mean over its own c[g, m] targets and C is the sum of all c.
FSDP averages gradients over all ranks, and the average over the sp ranks of a group is the group's gradient
(`patch_model`), so each backward starts from loss * c * dp / C.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mllm_seqpar.data.prefetch import read_ahead
from mllm_seqpar.errors import DataError
from mllm_seqpar.integrations.accelerate.fsdp2 import reshard

from .data_loader import ShardedBatch
from .parallel_dims import ParallelDims


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step, summed over all data parallel groups."""

    loss: float
    grad_norm: float
    targets: int
    tokens: int
    frames: int


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[ShardedBatch],
    dims: ParallelDims,
    clip: float,
    device: torch.device,
) -> StepResult:
    """Run forward and backward of each micro-batch, clip gradients, and update the parameters once.

    Args:
        model: prepared; gradients are averaged over all ranks by FSDP.
        optimizer: torch's own, with its learning rate set.
        batches: this group's micro-batches of the step.
        dims: the grid of ranks.
        clip: maximal global norm; 0 for none.
        device: of the model.

    Raises:
        DataError: if the step has no target token, or the loss or a gradient is not finite.
    """
    counts = [float(sum(getattr(b.chat, name) for b in batches)) for name in ("targets", "tokens", "frames")]
    targets, tokens, frames = dims.sum_over_dp(counts, device)
    if targets == 0:
        raise DataError("a step without a single target token; every sample needs an answer of the assistant")
    total = torch.zeros((), dtype=torch.float64, device=device)  # on the device: reading a loss waits for its pass
    inputs = read_ahead(batches, lambda batch: batch.inputs(device))
    for batch, arguments in zip(batches, inputs, strict=True):
        loss = model(**arguments).loss
        if loss.requires_grad:  # false if only the visual path trains and no group has frames
            (loss * (batch.chat.targets * dims.dp / targets)).backward()
        total += loss.detach().double() * batch.chat.targets
    total, norm = torch.stack([total, clip_gradients(model, clip).to(total)]).tolist()
    loss_sum = dims.sum_over_dp([total], device)[0]
    if not (math.isfinite(loss_sum) and math.isfinite(norm)):
        raise DataError(
            f"loss {loss_sum / targets} and gradient norm {norm}: not finite, so the parameters were not updated; "
            "lower --lr or look at the data of this step"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss_sum / targets, norm, int(targets), int(tokens), int(frames))


def clip_gradients(model: nn.Module, maximum: float) -> Tensor:
    """Return the norm of all gradients over all shards, and scale the gradients to at most `maximum` unless it is 0.

    The norm is a scalar tensor on the device of the gradients, which the host has not waited for.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not parameters:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if maximum:
        torch.nn.utils.clip_grads_with_norm_(parameters, maximum, norm)
    return _unsharded(norm)


def _unsharded(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[ShardedBatch, bool]],
    dims: ParallelDims,
    device: torch.device,
) -> tuple[float, int]:
    """Return (mean loss over all target tokens of all groups, number of these tokens).

    Args:
        model: prepared.
        batches: (micro-batch, whether it counts); equally many on every rank.
        dims: the grid of ranks.
        device: of the model.
    """
    model.eval()
    total, targets = torch.zeros((), dtype=torch.float64, device=device), 0
    try:
        with torch.no_grad():
            for batch, counts in batches:
                loss = model(**batch.inputs(device)).loss
                if counts:
                    total += loss.double() * batch.chat.targets
                    targets += batch.chat.targets
    finally:
        model.train()
        reshard(model)
    loss_sum, count = dims.sum_over_dp([total.item(), float(targets)], device)
    return loss_sum / max(1.0, count), int(count)
