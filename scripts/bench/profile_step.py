"""Profile a training step of a patched model with torch.profiler: time to compute, to wait for transfers, host time.

    python scripts/bench/profile_step.py [--family mplug_owl3 idefics ...] [--ranks 1 2] [--strategy lv-xattn]
        [--images 32] [--words 128] [--repeats 3] [--top 0] [--device cpu|cuda]

The models are those of `models.subject`. A step is forward, backward and the average of gradients over the ranks. The
unpatched model takes the same step on rank 0; loss and gradient norm must agree in every step, and `ratio` is the time
of a patched step over an unpatched one, the median of pairs without the profiler. The shares come from `key_averages`
of one more patched step, as the mean over ranks: on a CPU, computing is the self time of ATen operators, and waiting is
the self time inside transfers and collectives; on CUDA, both are the time of kernels (NCCL's for waiting). The
rest of the step is host time: Python, autograd and, on CUDA, gaps between kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from measure import print_environment, run_on_ranks
from models import SUBJECTS, subject
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.comm.base import Pending

NAMES = [name for name in SUBJECTS if name != "open_flamingo_all"]
STEP, TRANSFER = "training step", "transfer"
CLOSE = 1e-4
"""Largest relative difference of loss and gradient norm from the unpatched model's, in float32."""
HEAD = f"{'family':>14} {'ranks':>5} {'step, s':>8} {'ratio':>6} {'computing':>9} {'waiting':>9} {'host':>9}"


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    print_environment(args.device)
    print(HEAD)
    for ranks in args.ranks:
        run_on_ranks(ranks, args.device, args.threads, profile_families, args)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategy", default="lv-xattn", help="of the cross-attention")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--words", type=int, default=128, help="text tokens in addition to image placeholders")
    parser.add_argument("--repeats", type=int, default=3, help="number of timed pairs of steps")
    parser.add_argument("--top", type=int, default=0, help="also print the operators with the longest self time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process, on CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    args = parser.parse_args(argv)
    if args.device == "cuda" and torch.cuda.device_count() < max(args.ranks):
        parser.error(f"--ranks {max(args.ranks)}: this machine has {torch.cuda.device_count()} GPUs")
    return args


def profile_families(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per family, the same on each rank; rank 0 prints them."""
    return [profile_family(family, args) for family in args.family]


def profile_family(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time and profile the steps of one family; return and print its row.

    Raises:
        SystemExit: if loss or gradient norm of a patched step differs from the unpatched model's.
    """
    made, comm = subject(family, args.images, args.words), as_communicator(None)
    model = made.model.to(args.device)
    given = made.inputs | {"labels": made.labels()}
    inputs: dict[str, Any] = {name: x.to(args.device) for name, x in given.items()} | {"use_cache": False}
    pairs = []
    for repeat in range(1 + args.repeats):  # the first one warms up
        patch_model(model, args.strategy)
        patched = train_step(model, inputs, comm)
        unpatch_model(model)
        unpatched = train_step(model, inputs, None) if comm.rank == 0 else patched
        for name, found, expected in zip(("loss", "gradient norm"), patched[1:], unpatched[1:], strict=True):
            if not abs(found - expected) <= CLOSE * abs(expected):
                raise SystemExit(f"{family}, {comm.size} ranks: {name} {found}; the unpatched model's is {expected}")
        if repeat:
            pairs.append((patched[0], unpatched[0]))
    patch_model(model, args.strategy)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (args.device == "cuda")
    with recorded_transfers(comm), profile(activities=activities) as profiled, record_function(STEP):
        train_step(model, inputs, comm)
    unpatch_model(model)
    parts = [int(1e6 * share) for share in time_fractions(profiled, args.device)]
    computing, waiting = (sum(column) / comm.size / 1e6 for column in zip(*comm.gather_ints(parts), strict=True))
    row = {"family": family, "ranks": comm.size, "step_s": median(seconds for seconds, _ in pairs)}
    row |= {"ratio": median(patched / unpatched for patched, unpatched in pairs), "computing_share": computing}
    row |= {"waiting_share": waiting, "host_share": max(0.0, 1 - computing - waiting)}
    if comm.rank == 0:
        shares = " ".join(f"{row[f'{part}_share']:>9.1%}" for part in ("computing", "waiting", "host"))
        print(f"{family:>14} {row['ranks']:>5} {row['step_s']:>8.3f} {row['ratio']:>6.2f} {shares}", flush=True)
        if args.top:
            sort = "self_cuda_time_total" if args.device == "cuda" else "self_cpu_time_total"
            print(profiled.key_averages().table(sort_by=sort, row_limit=args.top), flush=True)
    return row


def train_step(model: Any, inputs: dict[str, Any], comm: Communicator | None) -> tuple[float, float, float]:
    """Run forward, backward and the average of gradients; return seconds (of the slowest rank), loss, gradient norm."""
    if comm is not None:
        comm.gather_ints([0])  # all ranks start together
    start = time.perf_counter()
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    if comm is not None and comm.size > 1:
        gradient = comm.all_reduce(gradient, "gradients") / comm.size
    result = float(loss.detach()), float(gradient.norm())  # these wait for the device
    nanoseconds = int((time.perf_counter() - start) * 1e9)
    if comm is not None:
        nanoseconds = max(row[0] for row in comm.gather_ints([nanoseconds]))
    return nanoseconds / 1e9, *result


@contextmanager
def recorded_transfers(comm: Communicator) -> Iterator[None]:
    """Record the time in transfers, with `record_function`, of all communicators of this one's class."""
    names = ("exchange", "all_gather", "reduce_scatter", "all_reduce")
    originals = {name: getattr(type(comm), name) for name in names}

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(TRANSFER):
                result = original(*args, **kwargs)
            return _RecordedPending(result) if isinstance(result, Pending) else result

        return run

    for name, original in originals.items():
        setattr(type(comm), name, recorded(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(type(comm), name, original)


class _RecordedPending(Pending):
    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> None:
        with record_function(TRANSFER):
            self._pending.wait()


def time_fractions(profiled: profile, device: str) -> tuple[float, float]:
    """Return the shares of a profiled step spent computing and waiting for transfers."""
    averages = profiled.key_averages()
    step_us = next(event.cpu_time_total for event in averages if event.key == STEP and event.cpu_time_total)
    if device == "cuda":
        kernels = [e for e in averages if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        times = [("nccl" in event.key.lower(), event.self_device_time_total) for event in kernels]
    else:
        prefixes = ("aten::", "c10d::", TRANSFER)
        operators = [event for event in averages if event.key.startswith(prefixes)]
        times = [(not event.key.startswith("aten::"), event.self_cpu_time_total) for event in operators]
    computing, waiting = (sum(us for is_transfer, us in times if is_transfer == kind) for kind in (False, True))
    return computing / step_us, waiting / step_us


if __name__ == "__main__":
    main()
