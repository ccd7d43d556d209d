"""The command line of a fine-tuning run, and its log, from the `trainer_state.json` that it writes at its end."""

import json
from pathlib import Path
from typing import Any

import pytest

STEP = ("step", "epoch", "loss", "grad_norm", "learning_rate")
EVALUATION = ("step", "eval_loss")


def fine_tuning(files: Path, output: Path, *more: object) -> list[str]:
    """Return the command line of a run on `training_files`; what `more` states replaces the options that runs share."""
    options: dict[str, object] = {"--model": files / "model", "--data": files / "train.jsonl", "--output_dir": output}
    options |= {"--disable_tqdm": True, "--learning_rate": 1e-3, "--adam_epsilon": 1e-4, "--save_steps": 1000}
    given = [text for name, value in options.items() if name not in more for text in (name, value)]
    return [*map(str, [*given, *more])]


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
