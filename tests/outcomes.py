"""The result of one forward and backward pass of a model, and how far two such results are apart."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Grads = dict[str, Tensor | None]


@dataclass
class Outcome:
    """The loss, logits, hidden states and gradients of parameters and inputs of one pass."""

    loss: float | None
    logits: Tensor | None
    hidden_states: list[Tensor]
    grads: Grads
    input_grads: Grads


def run_case(model: Any, inputs: dict[str, Any], out: Any = None) -> Outcome:
    """Run the forward pass (unless `out` is its output) and, if there is a loss, the backward pass."""
    out = model(**inputs, output_hidden_states=True) if out is None else out
    if out.loss is not None:
        out.loss.backward()
    return Outcome(
        None if out.loss is None else out.loss.item(),
        None if out.logits is None else out.logits.detach(),
        [state.detach() for state in out.hidden_states or ()],
        {name: weight.grad for name, weight in model.named_parameters()},
        {name: x.grad for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad},
    )


def average(ranks: list[Grads]) -> Grads:
    """Return the mean of all ranks' gradients, as DDP and FSDP compute it.

    Raises:
        AssertionError: a parameter has a gradient on some ranks only, which would stall FSDP.
    """
    found: Grads = {}
    for name in ranks[0]:
        grads = [grads[name] for grads in ranks]
        given = [grad for grad in grads if grad is not None]
        assert len(given) in (0, len(grads)), f"{name}: some ranks have a gradient and some have none"
        found[name] = torch.stack(given).mean(0) if given else None
    return found


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Euclidean norm."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)).item()


def worst_gradient(found: Grads, expected: Grads) -> tuple[float, str]:
    """Return the largest relative error of any gradient and the parameter's name.

    The error of a key bias, whose gradient is near zero, is relative to its weight's gradient. A gate of one number is
    a sum over all tokens and channels that may cancel, so its error is relative to all gates' gradients.
    """
    assert found.keys() == expected.keys()
    worst = (0.0, "")
    largest = max((x.double().norm().item() for x in expected.values() if x is not None), default=0.0)
    gates = sum(x.double().item() ** 2 for x in expected.values() if x is not None and x.numel() == 1) ** 0.5
    for name, theirs in expected.items():
        ours = found[name]
        if theirs is None or ours is None:
            # A tower that ran on an empty frame shard has zeros where the unpatched model has no gradient.
            assert theirs is None and (ours is None or not ours.any()), name
            continue
        scale = expected[name.replace("bias", "weight")] if name.endswith("k_proj.bias") else theirs
        assert scale is not None
        size = gates if theirs.numel() == 1 else scale.double().norm().item()
        if size < 1e-6 * largest:  # zero but for rounding, for instance with one visible key
            size = largest
        worst = max(worst, ((ours.double() - theirs.double()).norm().item() / size, name))
    return worst
