"""How far from float64 a result may be, in one place, with the reason for each size.

Errors are relative in the Frobenius norm: |x - exact| / |exact|. Attention outputs average many keys, so single entries
can be near zero while the tensor is right; a norm over the tensor neither hides a wrong block nor trips over those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

EXACT = {
    # Sums of some thousand products of 24-bit numbers: 1e-6 to 3e-6 in practice. The project's promise is 1e-5, and a
    # dropped key, a wrong mask bit or a phantom key shows at 1e-3 and above for the lengths the tests use.
    torch.float32: 1e-5,
    # The inputs are exact in float64 and nothing is rounded to less on the way.
    torch.float64: 1e-12,
    # One rounding of o to 8 bits is 2e-3, of the probabilities inside the kernel 2e-3 more; gradients add a third
    # (ds). Only a backstop: how good 16-bit kernels must be is relative to one device's own kernel, below.
    torch.bfloat16: 2e-2,
    # As bf16, with 11 bits.
    torch.float16: 2.5e-3,
}
"""Largest relative error to float64 by dtype of the inputs."""

AGAINST_ONE_DEVICE = 1.5
"""Times the error of one device's own attention in the same 16-bit dtype: blocks that are rounded one by one."""

AGAINST_ONE_DEVICE_FLOAT32_PARTIALS = 1.1
"""The same for kernels whose partial results are float32: nothing is rounded that one device does not round too."""

AGAINST_UNPATCHED = 2.0
"""Times the error of the unpatched model in the same 16-bit arithmetic, on the same machine. Both errors are rounding,
drawn by the processor: few of the rounded numbers matter much, so one may be 1.4 times the other. A value that is
rounded once more in every layer, or computed in 16 bits where the unpatched model keeps float32, adds more."""

DRIFT = 0.1
"""Largest mean error over mean absolute error: rounding has no direction, a lost or a phantom key has one."""


def relative_error(x: Tensor, exact: Tensor, terms: Tensor | float = 0.0) -> float:
    """|x - exact| / |exact| in float64; |x| where exact is zero, so that anything there counts.

    `terms` is the size of the terms whose sum x is. If the sum is smaller, because terms cancel, it is the scale.
    """
    x, exact = x.detach().double(), exact.detach().double()
    assert x.shape == exact.shape, (x.shape, exact.shape)
    size = max(float(exact.norm()), float(terms))
    return float((x - exact).norm()) / (size or 1.0)


def assert_as_near_as_unpatched(
    found: Mapping[str, Tensor], unpatched: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> None:
    """Hold 16-bit results against the unpatched model's: how far each is from `exact`, by groups of parameters.

    The parameters of one kind of block in all layers are a group: q_proj, k_proj and the others of `self_attn`. A few
    numbers are too few: the gradient of a gate is a sum that may cancel, and then its relative error is luck. So all
    gates of a tower are in one group with what the tower has outside its layers, such as its embeddings.
    """
    assert found.keys() == unpatched.keys() == exact.keys()
    groups: dict[str, list[str]] = defaultdict(list)
    for name, x in exact.items():
        parts = [part for part in name.split(".") if not part.isdigit()]
        groups[".".join(parts[:2] if x.numel() == 1 else parts[:-2])].append(name)
    for group, names in groups.items():
        ours, theirs, truth = (
            torch.cat([results[name].detach().double().flatten() for name in names])
            for results in (found, unpatched, exact)
        )
        error, allowed = relative_error(ours, truth), AGAINST_UNPATCHED * relative_error(theirs, truth)
        assert error <= allowed, f"{group or names}: {error:.2e} from exact, {allowed:.2e} allowed"


def drift(x: Tensor, exact: Tensor) -> float:
    """|mean error| over mean |error|: near 0 for rounding, near 1 for an error with a direction."""
    error = x.detach().double() - exact.detach().double()
    return float(error.mean().abs() / error.abs().mean().clamp_min(1e-300))
