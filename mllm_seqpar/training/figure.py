"""The figure of a training run: loss, evaluation and learning rate by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mllm_seqpar._logging import get_logger

FILE = "training.png"

_log = get_logger(__name__)


def write_figure(log: Sequence[Mapping[str, Any]], directory: Path) -> Path | None:
    """Write the figure of a log (`log_history`) and return its path; None without matplotlib, or without steps."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        _log.info("%s is not drawn: matplotlib is not installed", FILE)
        return None
    steps = [row for row in log if "loss" in row]
    evaluations = [row for row in log if "eval_loss" in row]
    if not steps:
        return None
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    numbers, mark = [row["step"] for row in steps], "." if len(steps) < 50 else ""
    loss.plot(numbers, [row["loss"] for row in steps], marker=mark, linewidth=1.2, label="training")
    if evaluations:
        points = [row["step"] for row in evaluations], [row["eval_loss"] for row in evaluations]
        loss.plot(*points, "o-", color="tab:orange", label="evaluation")
        loss.legend()
    loss.set_ylabel("loss per target token")
    rate.plot(numbers, [row["learning_rate"] for row in steps], marker=mark, linewidth=1.2, color="tab:green")
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    rate.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path = directory / FILE
    figure.savefig(path, dpi=120)
    return path
