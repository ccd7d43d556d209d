"""The log of a fine-tuning run, from the `trainer_state.json` that it writes at its end."""

import json
from pathlib import Path
from typing import Any

import pytest

STEP = ("step", "epoch", "loss", "grad_norm", "learning_rate")
EVALUATION = ("step", "eval_loss")


def log_of(output: Path) -> list[dict[str, Any]]:
    """Return the rows of steps and evaluations, without the values that vary from run to run."""
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [
        {name: row[name] for name in (STEP if "loss" in row else EVALUATION)}
        for row in log
        if "loss" in row or "eval_loss" in row
    ]


def assert_same_trajectory(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Assert that losses and gradient norms agree within 1e-4."""
    assert len(found) == len(expected) > 0
    for row, reference in zip(found, expected, strict=True):
        assert row == pytest.approx(reference, rel=1e-4)
