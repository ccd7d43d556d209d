"""Timing for the benchmark scripts: medians over shuffled repetitions, and rows that say where they were measured."""

from __future__ import annotations

import platform
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch


def environment(device: str) -> dict:
    """Return what a number depends on: hardware, threads, versions, commit."""
    row = {"torch": torch.__version__, "commit": commit()}
    if device == "cuda":
        row |= {"hardware": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        row |= {"cudnn": torch.backends.cudnn.version()}
    else:
        row |= {"hardware": _cpu_name(), "threads": torch.get_num_threads()}
    return row


def commit() -> str:
    """Return the short hash of the checkout, with + behind it when files were changed; "unknown" outside of one."""
    here = Path(__file__).parent
    try:
        name = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=here, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=here, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def once_ms(run: Callable[[], object], device: str) -> float:
    """Return the milliseconds of one call; on CUDA between two events, so that launching is not counted."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def medians_ms(runs: dict[str, Callable[[], object]], device: str, repeats: int, seed: int = 0) -> dict[str, float]:
    """Return the median milliseconds of each run, timed in an order that changes from repetition to repetition.

    A machine drifts (clocks, other users); in a fixed order the drift would favour whoever comes first.
    """
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffler = list(runs), random.Random(seed)
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            times[name].append(once_ms(runs[name], device))
    return {name: median(values) for name, values in times.items()}
