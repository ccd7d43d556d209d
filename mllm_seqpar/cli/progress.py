"""Reports of a running program: its results and notes, a progress bar, and the peak memory of this process."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch


def say(text: str) -> None:
    """Write a part of a result to standard output, which has results only."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line that is not a result to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def progress_bar(total: int, unit: str, title: str, show: bool = True) -> Any:
    """Return a tqdm bar on standard error, which counts without being visible unless `show` is True."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 10.0  # seconds; frequent updates would fill a log file
    return tqdm(total=total, unit=unit, desc=title, mininterval=interval, disable=not show)


class FramesBar:
    """A progress bar of the frames that all ranks have encoded, which appears with the first call."""

    def __init__(self, show: bool = True) -> None:
        self._show = show
        self._bar: Any = None

    def __enter__(self) -> FramesBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = progress_bar(total, "frame", "reading and encoding", self._show)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak on a GPU. The CPU's peak belongs to the whole process and cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float:
    """Return the peak in MiB: allocated on a GPU since the last reset, resident on a CPU since the process started."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)
