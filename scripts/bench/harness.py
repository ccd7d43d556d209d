"""What the benchmarks share: their common options, rows, timing, memory, and the ranks of a process group.

A benchmark makes its options with `options`, and yields rows from a function that `run` calls: it prints where the
benchmark runs, a line for each row and a table of all, and appends rows to the file `--out`, one line of
JSON each, with the columns of `environment`. What it measures on several ranks is a
function that `run_on_ranks` calls on each. Under torchrun, every rank runs the benchmark, and the first one prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import multiprocessing

# The first folder is for a checkout that is not installed.
sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("", "scripts/lib")]

import namespaces
from mllm_seqpar.comm import Communicator

T = TypeVar("T")
Row = dict[str, Any]


def options(doc: str | None, *, repeats: int | None = None, device: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks have in common; `repeats` is the default of --repeats."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append a line of JSON per measurement to this file")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="number of timed repetitions")
    if device:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
        parser.add_argument("--threads", type=int, default=1, help="threads of each process, on CPU")
    return parser


def run(
    args: argparse.Namespace,
    rows_of: Callable[[argparse.Namespace], Iterable[Row]],
    table: Callable[[Sequence[Row]], str] | None = None,
) -> None:
    """Print and record the rows of `rows_of(args)`, which may use `run_on_ranks`, and print a table of all of them."""
    device = getattr(args, "device", "cpu")
    torch.set_num_threads(args.threads if hasattr(args, "device") else 1)
    first = int(os.environ.get("RANK", "0")) == 0
    if first:
        print_environment(device)
    rows = []
    for row in rows_of(args):
        rows.append(row)
        if first:
            print(", ".join(f"{name} {value}" for name, value in rounded(row).items()), flush=True)
            record(args, [row])
    if first and table is not None:
        print(f"\n{table(rows)}")
    if dist.is_initialized():
        dist.barrier()  # a process that exits early closes its connections while other ranks still use them
        dist.destroy_process_group()


def record(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Append rows to the file of --out, if it is given, with the columns of `environment` that they do not have."""
    if args.out is not None:
        machine = environment(getattr(args, "device", "cpu"))
        with args.out.open("a") as file:
            file.writelines(f"{json.dumps(rounded(dict(row) | machine | dict(row)))}\n" for row in rows)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a file; an empty list if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rounded(row: Row, digits: int = 5) -> dict[str, Any]:
    return {name: float(f"{x:.{digits}g}") if isinstance(x, float) else x for name, x in row.items()}


def groups(rows: Sequence[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in columns), []).append(row)
    return found


def environment(device: str) -> dict[str, Any]:
    """Return the columns that say where a row was measured: hardware, threads, versions, commit."""
    row: dict[str, Any] = {"torch": torch.__version__, "transformers": version("transformers"), "commit": commit()}
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
    print(", ".join(f"{key} {value}" for key, value in environment(device).items()), flush=True)


def commit() -> str:
    """Return the short hash of the checkout, with "+" if files were changed, or "unknown" outside a checkout."""
    git = partial(subprocess.check_output, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL)
    try:
        name = git(["git", "rev-parse", "--short", "HEAD"]).strip()
        changed = git(["git", "status", "--porcelain", "-uno"]).strip()
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


def rounds(names: Iterable[T], repeats: int, *, warm_up: int = 1) -> Iterator[tuple[T, bool]]:
    """Yield each name once per round, and whether the round is timed or one of those that warm up.

    The order changes with each round: machines drift (clock frequency, other users), and a fixed order would favour
    one of the runs.
    """
    order, shuffler = list(names), random.Random(0)
    for number in range(warm_up + repeats):
        yield from ((name, number >= warm_up) for name in order)
        shuffler.shuffle(order)


def medians_ms(runs: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each run, in a changing order, after two warm-up calls each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, timed in rounds(runs, repeats, warm_up=2):
        ms = once_ms(runs[name], device)
        if timed:
            times[name].append(ms)
    return {name: median(values) for name, values in times.items()}


@contextmanager
def slowest_rank(comm: Communicator, device: torch.device | str) -> Iterator[SimpleNamespace]:
    """Time the block inside on all ranks, which start together; `seconds` are those of the slowest rank."""
    timer = SimpleNamespace(seconds=0.0)
    comm.gather_ints([0])
    synchronize(device)
    start = time.perf_counter()
    yield timer
    synchronize(device)
    nanoseconds = int((time.perf_counter() - start) * 1e9)
    timer.seconds = max(row[0] for row in comm.gather_ints([nanoseconds])) / 1e9


def run_on_ranks(
    ranks: int,
    args: argparse.Namespace,
    function: Callable[..., Any],
    *given: Any,
    links: namespaces.Network | None = None,
) -> list[Any]:
    """Run `function(args, *given)` on the ranks of the default process group; return results by rank.

    The ranks are new processes, each in its namespace of `links`, if given; under torchrun they are those of the
    launcher. The backend is NCCL on CUDA and gloo on a CPU. Results may consist of tensors and plain Python values.
    """
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != ranks:
            raise SystemExit(f"this measurement needs {ranks} ranks; the launcher started {os.environ['WORLD_SIZE']}")
        if not dist.is_initialized():
            _join_group(args, int(os.environ["LOCAL_RANK"]))
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, function(args, *given))
        return results
    if args.device == "cuda" and torch.cuda.device_count() < ranks:
        raise SystemExit(f"{ranks} ranks: this machine has {torch.cuda.device_count()} GPUs; use --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        try:
            # The ranks are forked from a process that has imported these once; it has used no GPU and has no threads.
            multiprocessing.set_forkserver_preload(["mllm_seqpar.comm", "transformers"])
            started = (ranks, folder, links, args, function, given)
            multiprocessing.start_processes(_rank_main, started, nprocs=ranks, start_method="forkserver")
        except multiprocessing.ProcessExitedException as error:  # its own message is above
            raise SystemExit(f"one of {ranks} ranks ended with status {error.exit_code}") from None
        return [torch.load(Path(folder) / f"rank{rank}") for rank in range(ranks)]


def _rank_main(
    rank: int,
    ranks: int,
    folder: str,
    links: namespaces.Network | None,
    args: argparse.Namespace,
    function: Callable[..., Any],
    given: tuple[Any, ...],
) -> None:
    if links is not None:
        namespaces.join(links.names[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # c10d warns that these addresses have no host names
    _join_group(args, rank, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(function(args, *given), Path(folder) / f"rank{rank}")
    dist.barrier()  # a process that exits early closes its connections while other ranks still use them
    dist.destroy_process_group()


def _join_group(args: argparse.Namespace, local_rank: int, **options: Any) -> None:
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **options)
