"""How far from float64 a result may be, with the reason for each size.

Errors are relative in the Frobenius norm: |x - exact| / |exact|. Attention outputs average many keys, so a single entry
may be near zero in a correct tensor; a norm over the tensor hides no wrong block and does not fail on such entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

EXACT = {
    # Sums of some thousand products of 24-bit numbers have errors of 1e-6 to 3e-6. The project promises 1e-5. For the
    # lengths of the tests, a dropped key, a wrong mask bit or an extra key shows at 1e-3 and above.
    torch.float32: 1e-5,
    # The inputs are exact in float64, and nothing is rounded to fewer bits.
    torch.float64: 1e-12,
    # One rounding of o to 8 bits is 2e-3, of the probabilities inside the kernel 2e-3 more; gradients add a third
    # (ds). This is a backstop: 16-bit kernels are compared with one device's own kernel, below.
    torch.bfloat16: 2e-2,
    # As bfloat16, with 11 bits.
    torch.float16: 2.5e-3,
}
"""Largest relative error to float64, by dtype of the inputs."""

AGAINST_ONE_DEVICE = 1.5
"""Largest error relative to that of one device's attention in the same 16-bit dtype, for blocks that are rounded."""

AGAINST_ONE_DEVICE_FLOAT32_PARTIALS = 1.1
"""The same for kernels with float32 partial results, which round nothing that one device does not round too."""

AGAINST_UNPATCHED = 2.0
"""Largest error relative to that of the unpatched model in the same 16-bit arithmetic on the same machine. Both errors
are rounding and depend on the processor; few of the rounded numbers matter much, so their ratio reaches 1.4. A value
that is rounded once more in every layer, or computed in 16 bits instead of float32, adds more."""

DRIFT = 0.1
"""Largest mean error over mean absolute error: rounding has no direction, but a dropped or an extra key has one."""


def relative_error(x: Tensor, exact: Tensor, terms: Tensor | float = 0.0) -> float:
    """Return |x - exact| / |exact| in float64, or |x| where exact is zero.

    `terms` is the size of the terms whose sum x is. If terms cancel, it is larger than the sum, and it is the scale.
    """
    x, exact = x.detach().double(), exact.detach().double()
    assert x.shape == exact.shape, (x.shape, exact.shape)
    size = max(float(exact.norm()), float(terms))
    return float((x - exact).norm()) / (size or 1.0)


def assert_as_near_as_unpatched(
    found: Mapping[str, Tensor], unpatched: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> None:
    """Compare the errors of 16-bit results with those of the unpatched model, by groups of parameters.

    The parameters of one kind of block in all layers form a group: q_proj, k_proj and the others of `self_attn`. The
    gradient of a gate is a sum that may cancel, so its own relative error is chance: all gates of a tower are in one
    group with the parameters that the tower has outside its layers, such as its embeddings.
    """
    assert found.keys() == unpatched.keys() == exact.keys()
    groups: dict[str, list[str]] = defaultdict(list)
    for name, x in exact.items():
        parts = [part for part in name.split(".") if not part.isdigit()]
        groups[".".join(parts[:2] if x.numel() == 1 else parts[:-2])].append(name)
    for group, names in groups.items():
        ours, theirs, truth = (
            torch.cat([x[name].detach().double().flatten() for name in names]) for x in (found, unpatched, exact)
        )
        error, allowed = relative_error(ours, truth), AGAINST_UNPATCHED * relative_error(theirs, truth)
        assert error <= allowed, f"{group or names}: {error:.2e} from exact, {allowed:.2e} allowed"


def drift(x: Tensor, exact: Tensor) -> float:
    """Return |mean error| over mean |error|: near 0 for rounding, near 1 for an error with a direction."""
    error = x.detach().double() - exact.detach().double()
    return float(error.mean().abs() / error.abs().mean().clamp_min(1e-300))
