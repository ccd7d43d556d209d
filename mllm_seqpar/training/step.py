"""One optimizer step and one evaluation, exact over micro-batches and data parallel groups.

The objective of a step is the mean over all its target tokens: the sum over groups g and micro-batches m of
c[g, m] * loss[g, m] / C, where loss[g, m] is the model's mean over its own c[g, m] targets and C the sum of all c. FSDP
averages gradients over all ranks, the sp ranks of a group give the group's gradient on average (contract of
`patch_model`, point 3), so each backward starts from loss * c * dp / C.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mllm_seqpar.data.prefetch import read_ahead
from mllm_seqpar.errors import DataError
from mllm_seqpar.integrations.accelerate.launch import Layout, reshard


class Batch(Protocol):
    """What the steps need to know of one micro-batch; `mllm_seqpar.training.data_loader` makes them."""

    @property
    def targets(self) -> int:
        """Tokens that the loss counts."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of text."""
        ...

    @property
    def frames(self) -> int:
        """Frames of the whole group."""
        ...

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of the model's forward, labels among them, on `device`."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, summed over all data parallel groups."""

    loss: float
    grad_norm: float
    targets: int
    tokens: int
    frames: int


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    layout: Layout,
    clip: float,
    device: torch.device,
) -> StepResult:
    """Forward and backward of each micro-batch, clipping, one update.

    Args:
        model: prepared; gradients are averaged over all ranks by FSDP.
        optimizer: torch's own, its learning rate set.
        batches: this group's micro-batches of the step.
        layout: of the ranks.
        clip: maximal global norm; 0 for none.
        device: of the model.

    Raises:
        DataError: the step has no target token, or loss or gradients are not finite.
    """
    counts = [float(sum(getattr(b, name) for b in batches)) for name in ("targets", "tokens", "frames")]
    targets, tokens, frames = layout.sum_over_dp(counts, device)
    if targets == 0:
        raise DataError("a step without a single target token; every sample needs an answer of the assistant")
    total = 0.0
    inputs = read_ahead(batches, lambda batch: batch.inputs(device))
    for batch, arguments in zip(batches, inputs, strict=True):
        loss = model(**arguments).loss
        if loss.requires_grad:  # not where all that trains is what frames go through, and no group has any
            (loss * (batch.targets * layout.dp / targets)).backward()
        total += loss.item() * batch.targets
    loss_sum = layout.sum_over_dp([total], device)[0]
    norm = clip_gradients(model, clip)
    if not (math.isfinite(loss_sum) and math.isfinite(norm)):
        raise DataError(
            f"loss {loss_sum / targets} and gradient norm {norm}: not finite, so the parameters were not updated; "
            "lower --lr or look at the data of this step"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss_sum / targets, norm, int(targets), int(tokens), int(frames))


def clip_gradients(model: nn.Module, maximum: float) -> float:
    """The norm of all gradients together, over all shards; scales them down to `maximum` unless that is 0."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not parameters:
        return 0.0
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if maximum:
        torch.nn.utils.clip_grads_with_norm_(parameters, maximum, norm)
    return float(_whole(norm))


def _whole(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Batch, bool]],
    layout: Layout,
    device: torch.device,
) -> tuple[float, int]:
    """(mean loss over all target tokens of all groups, their number).

    Args:
        model: prepared.
        batches: (micro-batch, whether it counts); equally many on every rank.
        layout: of the ranks.
        device: of the model.
    """
    model.eval()
    total, targets = 0.0, 0
    try:
        with torch.no_grad():
            for batch, counts in batches:
                loss = model(**batch.inputs(device)).loss
                if counts:
                    total += loss.item() * batch.targets
                    targets += batch.targets
    finally:
        model.train()
        reshard(model)
    total, whole = layout.sum_over_dp([total, float(targets)], device)
    return total / max(1.0, whole), int(whole)
