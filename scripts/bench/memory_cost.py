"""What recomputing K and V costs: a step with and one without, one right after the other, as a ratio."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from memory_steps import Bench, Mode


def cost_of(bench: Bench, frames: int, repeats: int) -> dict[str, Any]:
    """Seconds of a step, of the slowest rank, with recomputation and without, by lv-xattn.

    A machine that others use drifts from one minute to the next, so each repetition times both, in an order that
    changes, and the ratio is the median of the repetitions' ratios.
    """
    pairs = []
    for repeat in range(1 + repeats):  # the first one warms up
        order = (True, False) if repeat % 2 else (False, True)
        seconds = {again: once(bench, Mode("lv-xattn", again), frames) for again in order}
        if repeat:
            pairs.append(seconds)
    ratio = median(pair[True] / pair[False] for pair in pairs)
    return {
        "frames": frames,
        "repeats": repeats,
        "again_s": median(pair[True] for pair in pairs),
        "kept_s": median(pair[False] for pair in pairs),
        "ratio": ratio,
        "share": 1 - 1 / ratio,
    }


def once(bench: Bench, mode: Mode, frames: int) -> float:
    """Seconds of forward and backward."""
    with bench.patched(mode):
        features = bench.features(frames)
        bench.comm.gather_ints([0])  # together
        _finish(bench)
        start = time.perf_counter()
        bench.loss(frames, features).backward()
        _finish(bench)
        nanoseconds = int((time.perf_counter() - start) * 1e9)
        return max(row[0] for row in bench.comm.gather_ints([nanoseconds])) / 1e9


def _finish(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
