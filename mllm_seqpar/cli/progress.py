"""Reports of a running program: results and notes, a progress bar, times, and the peak memory of this process."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def quiet_transformers() -> None:
    """Turn off the warnings and the progress bars of transformers, so that the output of a command is its own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


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


class Clock:
    """The time that a program spends in each named part, including intervals that end with an error.

    Args:
        device: of the model.
        synchronize: whether `measure` waits for the device before it reads the clock.
    """

    def __init__(self, device: torch.device, *, synchronize: bool = False) -> None:
        self._device, self._synchronize = device, synchronize
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the host's time inside the context as this part."""
        begin = time.perf_counter()
        try:
            yield
            if self._synchronize and self._device.type == "cuda":  # after an error, it may never end
                torch.cuda.synchronize(self._device)
        finally:
            self._add(part, time.perf_counter() - begin)

    @contextmanager
    def measure_device(self, part: str) -> Iterator[None]:
        """Count the computation inside the context as this part; on a GPU, the time of its current stream."""
        if self._device.type != "cuda":
            with self.measure(part):
                yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._events.append((part, begin, end))

    def seconds(self) -> dict[str, float]:
        """Return the time of each part so far, after waiting for the events of `measure_device`."""
        for part, begin, end in self._events:
            end.synchronize()
            self._add(part, begin.elapsed_time(end) / 1000)
        self._events.clear()
        return dict(self._seconds)

    def _add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds


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
