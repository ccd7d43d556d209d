"""What a run shows: the summary before its first step, the rows of its log, and the figure of its losses.

`trainer_state.json` has more than the rows that are printed, such as the memory of each rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import ProgressCallback

from mllm_seqpar._logging import get_logger
from mllm_seqpar.cli.progress import Clock, peak_memory, reset_peak_memory, say
from mllm_seqpar.patching.changes import Patch

_WIDTHS = 13, 8, 9, 13, 8, 9
_COLUMNS = "step", "ETA", "loss", "learning rate", "tokens/s", "data wait"


def _line(*cells: str) -> str:
    """Return cells under their columns, with at least two spaces between them, however long they are."""
    return "  ".join(
        [*(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=False)), *cells[len(_WIDTHS) :]]
    )


HEADER = _line(*_COLUMNS, "peak memory")
_ROWS = 40
"""Rows from header to header."""

FIGURE = "training.png"

_log = get_logger(__name__)

_PEAK = "peak_memory_mib/rank_"


class Throughput:
    """Statistics of this rank's training steps since the last report.

    Args:
        patch: that of the trained model, which counts frames and the time spent waiting for transfers.
        device: of the model.
    """

    def __init__(self, patch: Patch, device: torch.device) -> None:
        self._context, self._device = patch.context, device
        self._tokens: Tensor | int = 0
        self._frames = 0
        self._waited = 0.0
        self._clock = Clock(device)
        self._since = time.perf_counter()

    @contextmanager
    def step(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Count the tokens of a batch without padding, and measure the training step inside the context."""
        mask, text = inputs.get("attention_mask"), inputs.get("input_ids", inputs.get("lang_x"))
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self._tokens = self._tokens + mask.count_nonzero()  # not read here: the host would wait for the device
        elif isinstance(text, Tensor):
            self._tokens = self._tokens + text.numel()
        frames, waited = self._context.frames_seen, self._context.comm.bytes.waited
        try:
            yield
        finally:
            self._frames += self._context.frames_seen - frames
            self._waited += max(0.0, self._context.comm.bytes.waited - waited)

    def data_wait(self) -> AbstractContextManager[None]:
        """Return a context whose time counts as waiting for batches."""
        return self._clock.measure("data wait")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside the context, in which the run evaluates or saves, from the next report."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - max(before, self._since)  # a report inside has started again

    def report(self, accelerator: Any, degree: int) -> dict[str, float]:
        """Return the statistics of all ranks and reset them. All ranks call this at the same step.

        Args:
            accelerator: gathers one small tensor over all ranks.
            degree: number of ranks that share a sample.
        """
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        data_wait = self._clock.seconds().get("data wait", 0.0)
        row = [float(self._tokens), float(self._frames), self._waited, data_wait, peak_memory(self._device)]
        rows = accelerator.gather(torch.tensor([row], device=self._device)).cpu()
        self._tokens, self._frames, self._waited, self._clock = 0, 0, 0.0, Clock(self._device)
        reset_peak_memory(self._device)
        tokens, frames = rows[::degree, :2].sum(0).tolist()
        report = {"tokens_per_second": tokens / seconds, "frames_per_second": frames / seconds}
        report["data_wait_seconds"] = float(rows[:, 3].max())
        if not getattr(self._context.comm, "uses_nccl", False):  # the host does not wait for NCCL
            report["exposed_communication_seconds"] = float(rows[:, 2].max())
        return report | {f"peak_memory_mib/rank_{rank}": round(float(peak), 1) for rank, peak in enumerate(rows[:, 4])}


class TerminalLog(ProgressCallback):
    """Prints rows on rank 0. While it evaluates, it shows a progress bar if standard error is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._begin = self._timed_from = self._rows = 0
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin = self._timed_from = state.global_step
        self._since = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._begin + 1:  # the first step is slower, so the estimate leaves it out
            self._timed_from, self._since = state.global_step, time.monotonic()

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if sys.stderr.isatty() and not args.disable_tqdm:
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        if "loss" in logs:
            if self._rows % _ROWS == 0:
                say(f"{HEADER}\n")
            self._rows += 1
            eta, done = "...", state.global_step - self._timed_from
            if done:  # this was not the first step
                seconds = (time.monotonic() - self._since) / done * (state.max_steps - state.global_step)
                eta = str(timedelta(seconds=round(seconds)))
            say(row(logs, state.global_step, state.max_steps, eta) + "\n")
        elif "eval_loss" in logs:
            loss = _line("evaluation", "", f"{logs['eval_loss']:.4g}")
            say(f"{loss}  after step {state.global_step:,}\n")
        elif "train_runtime" in logs:
            duration = timedelta(seconds=round(logs["train_runtime"]))
            say(f"{state.global_step:,} steps, {duration}, mean loss {logs['train_loss']:.4g}\n")


def row(logs: Mapping[str, float], step: int, steps: int, eta: str) -> str:
    """Return one row of the log, under `HEADER`."""
    peaks = {name.removeprefix(_PEAK): value for name, value in logs.items() if name.startswith(_PEAK)}
    rank = max(peaks, key=lambda name: peaks[name], default=None)
    peak = [] if rank is None else [f"{_size(peaks[rank])} (rank {rank})"]
    rate, wait = logs.get("tokens_per_second", 0.0), logs.get("data_wait_seconds", 0.0)
    numbers = f"{logs['loss']:.4g}", f"{logs['learning_rate']:.3g}", f"{rate:,.0f}", f"{wait:.1f} s"
    return _line(f"{step}/{steps}", eta, *numbers, *peak)


def _size(mib: float) -> str:
    return f"{mib:,.0f} MiB" if mib < 10_000 else f"{mib / 1024:,.1f} GiB"


def write_figure(log: Sequence[Mapping[str, Any]], directory: Path) -> Path | None:
    """Write the figure of a log (`log_history`) and return its path; None without matplotlib, or without steps."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        _log.info("%s is not drawn: matplotlib is not installed", FIGURE)
        return None
    steps = [row for row in log if "loss" in row]
    evaluations = [row for row in log if "eval_loss" in row]
    if not steps:
        return None
    figure = Figure(figsize=(8, 5.5))  # a layout engine would draw it twice, which takes as long as several small steps
    margins = {"left": 0.11, "right": 0.97, "top": 0.97, "bottom": 0.09, "hspace": 0.14}
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1), gridspec_kw=margins)
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
    path = directory / FIGURE
    figure.savefig(path, dpi=120)
    return path
