"""The learning rate as a function of the step: no state, so nothing to save and nothing that drifts on resume."""

import math

from mllm_seqpar.errors import ConfigError


def warmup_steps(warmup: float, steps: int) -> int:
    """Whole steps of warmup: `warmup` itself, or that part of `steps` when it is below 1."""
    return math.ceil(warmup * steps) if warmup < 1 else round(warmup)


def learning_rate(step: int, *, steps: int, peak: float, floor: float, warmup: int, schedule: str) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    Linear from ``peak / warmup`` to `peak` over the first `warmup` steps, then by `schedule` towards
    ``peak * floor`` at step `steps`.

    Raises:
        ConfigError: an unknown schedule.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (floor + (1 - floor) * (1 - done))
    if schedule == "cosine":
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
    raise ConfigError(f"schedule: {schedule!r} is unknown; choose cosine, linear or constant")
