"""What a forward pass does on the device: its kernels from a profiler trace, and its host synchronisations."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NOT_KERNELS = ("memcpy", "memset")


class Kernel(NamedTuple):
    """A kernel on the device, with its stream and its times in nanoseconds."""

    name: str
    stream: int
    start: int
    stop: int


def kernels_of(run: Callable[[], object]) -> list[Kernel]:
    """Return the CUDA kernels of one call of `run`."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        Kernel(event.name(), event.device_resource_id(), event.start_ns(), event.end_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
        and not event.is_user_annotation()
        and not event.name().lower().startswith(NOT_KERNELS)
    ]


def is_transfer(kernel: Kernel) -> bool:
    return "nccl" in kernel.name.lower()


def hidden_share(kernels: Iterable[Kernel]) -> float:
    """Return the fraction of the time of NCCL kernels in which another kernel runs; 0 without NCCL kernels."""
    kernels = sorted(kernels, key=lambda kernel: kernel.start)
    busy: list[list[int]] = []  # disjoint intervals in which a kernel computes
    for kernel in kernels:
        if is_transfer(kernel):
            continue
        if busy and kernel.start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], kernel.stop)
        else:
            busy.append([kernel.start, kernel.stop])
    transfers = [kernel for kernel in kernels if is_transfer(kernel)]
    total = sum(kernel.stop - kernel.start for kernel in transfers)
    hidden = sum(
        max(0, min(kernel.stop, stop) - max(kernel.start, start)) for kernel in transfers for start, stop in busy
    )
    return hidden / total if total else 0.0


def streams(kernels: Iterable[Kernel], collective: str) -> set[int]:
    """Return the streams of the NCCL kernels whose name contains `collective`."""
    return {kernel.stream for kernel in kernels if is_transfer(kernel) and collective in kernel.name}


def host_synchronisations(run: Callable[[], object]) -> Counter[str]:
    """Return how often each line of Python makes the host wait for the device in one call of `run`."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{Path(x.filename).name}:{x.lineno}" for x in caught if "synchronizing CUDA" in str(x.message))
