"""Helpers that the benchmarks share: a description of the machine, timing, memory, and the ranks of a process group."""

from __future__ import annotations

import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.profiler import ProfilerActivity, profile


def environment(device: str) -> dict[str, Any]:
    """Return the columns that say where a row was measured: hardware, threads, versions, commit."""
    row: dict[str, Any] = {"torch": torch.__version__, "commit": commit()}
    if device == "cuda":
        row |= {"hardware": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        return row | {"cudnn": torch.backends.cudnn.version()}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = [platform.processor()]
    return row | {"hardware": next(filter(None, names), platform.machine()), "threads": torch.get_num_threads()}


def print_environment(device: str) -> None:
    """Print the columns of `environment` in one line."""
    print(", ".join(f"{key} {value}" for key, value in environment(device).items()), flush=True)


def commit() -> str:
    """Return the short hash of the checkout, with "+" if files were changed, or "unknown" outside a checkout."""
    folder = Path(__file__).parent
    try:
        name = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=folder, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=folder, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def once_ms(run: Callable[[], object], device: str) -> float:
    """Return the milliseconds of one call; on CUDA between two events, without the time of the launch."""
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


def medians_ms(runs: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each run, after two warm-up calls each.

    The order changes with each repetition: machines drift (clock frequency, other users), and a fixed order would
    favour one of the runs.
    """
    for run in (*runs.values(), *runs.values()):
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffler = list(runs), random.Random(0)
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            times[name].append(once_ms(runs[name], device))
    return {name: median(values) for name, values in times.items()}


@contextmanager
def peak_memory(device: torch.device) -> Iterator[SimpleNamespace]:
    """Measure the most `bytes` allocated at one time in the block inside, above those before; set when the block ends.

    On CUDA it comes from the allocator's statistics. On a CPU it comes from the profiler's memory events, which include
    the temporary buffers of operators.
    """
    peak = SimpleNamespace(bytes=0)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield peak
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    allocated = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"):
        allocated += size
        peak.bytes = max(peak.bytes, allocated)


class SavedBytes:
    """The bytes of the storages that autograd saves for backward, each once, without those of `excluded` tensors."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {x.untyped_storage().data_ptr() for x in excluded}
        self._sizes: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        return sum(size for address, size in self._sizes.items() if address not in self._excluded)

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self._sizes[storage.data_ptr()] = storage.nbytes()
        return x.detach()  # x itself refers to the graph node that saves it: a reference cycle that is never freed


def run_on_ranks(ranks: int, device: str, threads: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` in `ranks` new processes that form the default process group; return results by rank.

    The backend is NCCL on CUDA and gloo on a CPU. Results may consist of tensors and plain Python values.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, device, threads, folder, function, args)
        multiprocessing.spawn(_rank_main, given, nprocs=ranks)  # type: ignore[attr-defined]
        return [torch.load(Path(folder) / f"rank{rank}") for rank in range(ranks)]


def _rank_main(
    rank: int, ranks: int, device: str, threads: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(function(*args), Path(folder) / f"rank{rank}")
    dist.barrier()  # a process that exits early closes its connections while other ranks still use them
    dist.destroy_process_group()
