"""What one pass of a model gave, and how far two such outcomes are apart."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Outcome:
    """What one pass gave: numbers of this rank, gradients averaged over all ranks (rank 0 has them)."""

    loss: float | None
    logits: Tensor
    hidden_states: list[Tensor]
    grads: dict[str, Tensor | None]
    input_grads: dict[str, Tensor | None]


def run_case(model: Any, inputs: dict[str, Any]) -> Outcome:
    """Forward with and, when there are labels, backward."""
    out = model(**inputs, output_hidden_states=True)
    if out.loss is not None:
        out.loss.backward()
    return Outcome(
        None if out.loss is None else out.loss.item(),
        out.logits.detach(),
        [state.detach() for state in out.hidden_states],
        {name: weight.grad for name, weight in model.named_parameters()},
        {name: x.grad for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad},
    )


def average(grads: dict[str, Tensor | None], world: int) -> None:
    """In place, as DDP does; ranks that have no gradient count as zero."""
    for name in sorted(grads):
        grad = grads[name]
        missing = torch.tensor([grad is None], dtype=torch.long)
        dist.all_reduce(missing)
        if missing.item() == world:
            continue
        assert missing.item() == 0, f"{name}: some ranks have a gradient and some have none, which stalls FSDP"
        assert grad is not None
        dist.all_reduce(grad)
        grad /= world


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, in the Euclidean norm."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)).item()


def worst_gradient(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> tuple[float, str]:
    """The largest relative error of any gradient, and whose. A key bias has next to none: its weight's is the scale.

    A gate of one number is a sum over all tokens and channels that may cancel; all gates' gradients are their scale.
    """
    assert found.keys() == expected.keys()
    worst = (0.0, "")
    largest = max((x.double().norm().item() for x in expected.values() if x is not None), default=0.0)
    gates = sum(x.double().item() ** 2 for x in expected.values() if x is not None and x.numel() == 1) ** 0.5
    for name, reference_ in expected.items():
        mine = found[name]
        if reference_ is None or mine is None:
            # a tower that saw only an empty frame has zeros where the unpatched model has nothing
            assert reference_ is None and (mine is None or not mine.any()), name
            continue
        scale = expected[name.replace("bias", "weight")] if name.endswith("k_proj.bias") else reference_
        assert scale is not None
        size = gates if reference_.numel() == 1 else scale.double().norm().item()
        if size < 1e-6 * largest:  # zero but for rounding (one visible key: nothing to choose): no scale of its own
            size = largest
        worst = max(worst, ((mine.double() - reference_.double()).norm().item() / size, name))
    return worst
