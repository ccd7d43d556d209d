"""The learning rate as a function of the step, without state that a checkpoint would have to save."""

import math

from mllm_seqpar.errors import ConfigError


def warmup_steps(warmup: float, steps: int) -> int:
    """Return the number of warmup steps: `warmup`, or this fraction of `steps` if it is below 1."""
    return math.ceil(warmup * steps) if warmup < 1 else round(warmup)


def learning_rate(step: int, *, steps: int, peak: float, floor: float, warmup: int, schedule: str) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    It rises linearly from ``peak / warmup`` to `peak` over the first `warmup` steps, then follows `schedule` towards
    ``peak * floor`` at step `steps`.

    Raises:
        ConfigError: if `schedule` is unknown.
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
