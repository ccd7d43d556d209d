"""Check on one or several CUDA GPUs, in under 5 minutes, that the code, which was developed on CPUs, is correct and
fast there.

    python scripts/gpu_check.py [--json rows.jsonl]
    python scripts/gpu_check.py --ranks N [--json rows.jsonl]
    python scripts/gpu_check.py --device cpu        # a rehearsal: the same checks with tiny sizes, without a GPU

With one GPU the checks are: every CUDA kernel in bf16, fp16 and float32 against float64, and its speed against
`scaled_dot_product_attention`; the kernel that "auto" takes; host synchronisations; every distributed algorithm with
all ranks in one process; memory with and without recomputation; a training step of an mPLUG-Owl3 with the real width.

With --ranks, on N GPUs of this node over NCCL (on the CPU: over gloo): every distributed algorithm against float64; the
times with and without overlap, and how much of the transfers the attention kernels hide; two steps under FSDP2 against
one device, also with accelerate's `prepare`, bf16 and gradient checkpointing, and of two groups with a batch each;
reserved memory, streams and host synchronisations; the end of all ranks after one was killed. If only one GPU is
visible, all ranks share it: the order, the streams and the numbers are those of NCCL, but transfers go over sockets, so
times and overlap mean nothing.

Each part runs in processes of its own with a time limit, so a kernel that crashes, hangs or fails becomes a row of the
table and the other parts still run. The exit status is 1 if a row failed. Without a GPU the script says so and exits
with 0.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

# The first folder is for a checkout that is not installed.
sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "scripts/bench", "scripts/lib")]

from gpu_checks.common import Row, read, table, write
from gpu_checks.kernels import IMPLEMENTATIONS, why_not_run
from gpu_checks.processes import Ended, run_ranks
from harness import print_environment

from mllm_seqpar.cli import program_exit
from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.kernels import kernel_names


class Part(NamedTuple):
    check: str  # module and function of `gpu_checks`
    limit_s: float


PARTS = {
    "kernels": Part("kernels.check_kernel", 110.0),  # runs once for each of KERNELS
    "one_gpu": Part("kernels.check_one_gpu", 75.0),
    "ring": Part("attention.check_in_one_process", 75.0),
    "memory": Part("training.check_memory", 75.0),
    "training": Part("training.check_in_one_process", 120.0),
}
RANKS_PARTS = {
    "ranks_groups": Part("groups.check", 75.0),
    "ranks_attention": Part("attention.check_ranks", 100.0),
    "ranks_training": Part("training.check_ranks", 120.0),
    "ranks_fsdp": Part("training.check_users", 120.0),
    "ranks_lost": Part("attention.check_lost_rank", 150.0),
}
"""The parts of --ranks, which run in one process per rank."""
BUDGET_S = {"cuda": 290.0, "cpu": 600.0}
"""Time of all parts together; parts that no longer fit are reported as not run."""
KERNELS = {
    "cuda": [
        *(f"cuda_flash@{implementation}" for implementation in IMPLEMENTATIONS),
        *(name for name in kernel_names() if name != "torch_cpu"),
    ],
    "cpu": ["torch_cpu", "blocked_matmul"],
}
"""The kernels of the part "kernels"; "cuda_flash@FA3" activates that version first."""
TIMEOUT_S, LOST_TIMEOUT_S = 60.0, 30.0
"""Time limit of the ranks' process group, and in the part "ranks_lost"."""
GRACE_S = 10.0
"""Time for the other ranks to end after one has failed."""
MARGIN_S = {"cuda": 60.0, "cpu": 30.0}
"""Time that ranks may need beyond LOST_TIMEOUT_S: on CUDA, NCCL's watchdog writes a report and aborts the process."""
MESSAGES = ("another rank ended", "most likely ended", "watchdog", "timeout", "timed out", "nccl")
"""What a rank may write after another one was lost."""


def main() -> int:
    """Run all parts, or the one that was asked for in a child process; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal with tiny sizes")
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="check N ranks, on a GPU each, or all on the only GPU"
    )
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *RANKS_PARTS], help="only these parts")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA GPU here, nothing was checked")
        return 0
    if args.part in RANKS_PARTS:
        program_exit.run(lambda argv: run_part_on_ranks(args.part, args.device, args.json), [])
        return 0
    if args.part:
        for row in run_part(args.part, args.device):
            write(args.json, row)
        return 0
    if args.ranks == 1 or args.ranks < 0:
        parser.error(f"--ranks {args.ranks}: expected 2 or more")
    gpus = torch.cuda.device_count() if args.device == "cuda" else args.ranks
    if args.ranks > gpus > 1:
        parser.error(
            f"--ranks {args.ranks}: this node has {gpus} GPUs; use one rank for each GPU, or make one GPU visible "
            "(CUDA_VISIBLE_DEVICES=0), which all ranks then share"
        )
    print_environment(args.device)
    if args.ranks > gpus:
        print(f"{args.ranks} ranks share one GPU: results are checked, but times and overlap mean nothing", flush=True)
    rows = run_all(args.device, args.parts, args.ranks)
    print(table(rows))
    if args.json:
        args.json.unlink(missing_ok=True)
        for row in rows:
            write(args.json, row)
    return 1 if any(row.ok is False for row in rows) else 0


def run_all(device: str, only: Sequence[str] | None = None, ranks: int = 0) -> list[Row]:
    """Run every part, or those of --ranks (or of `only`), in processes of their own, and return the rows."""
    rows: list[Row] = []
    start = time.monotonic()
    for name, part in (RANKS_PARTS if ranks else PARTS).items():
        if only and name not in only:
            continue
        kernels = KERNELS[device] if name == "kernels" else []
        missing = {kernel: reason for kernel in kernels if (reason := why_not_run(kernel, device))}
        rows += [Row("kernel exact", kernel, reason) for kernel, reason in missing.items()]
        for full_name in [f"kernels:{kernel}" for kernel in kernels if kernel not in missing] if kernels else [name]:
            elapsed = time.monotonic() - start
            limit = min(part.limit_s, BUDGET_S[device] - elapsed)
            print(f"[{elapsed:4.0f} s] {full_name}", flush=True)
            if limit > 10:
                rows += run_child(full_name, device, limit, ranks)
            else:
                rows.append(Row(full_name, "", "not run: out of time", "", False))
    return rows


def run_child(part: str, device: str, limit_s: float, ranks: int = 0) -> list[Row]:
    """Run one part in a child process, or one of --ranks in one per rank; return its rows, and one more for each
    process that failed."""
    one_gpu = device == "cuda" and ranks > torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        command = [sys.executable, __file__, "--device", device, "--part", part, "--json", str(path)]
        commands = [command] * max(1, ranks)
        if part == "ranks_lost":  # here the ranks must fail, and without help
            return lost_rank_rows(run_ranks(commands, limit_s=limit_s, grace_s=limit_s, one_gpu=one_gpu), device)
        ended = run_ranks(commands, limit_s=limit_s, grace_s=GRACE_S, one_gpu=one_gpu)
        return read(path) + [Row(part, "", rank.problem, "", False) for rank in ended if rank.problem]


def lost_rank_rows(ended: Sequence[Ended], device: str) -> list[Row]:
    """Return one row for each rank that was not killed; times count from the end of the killed rank."""
    limit, killed = LOST_TIMEOUT_S + MARGIN_S[device], ended[-1]
    rows = []
    for rank in ended[:-1]:
        seconds = rank.seconds - killed.seconds
        named = any(text in rank.output.lower() for text in MESSAGES)
        ok = killed.status == -signal.SIGKILL and bool(rank.status) and seconds <= limit and named
        how = "did not end" if rank.status is None else f"ended with status {rank.status}"
        found = f"{how} after {seconds:.1f} s: {rank.message}"
        rows.append(Row("lost rank", f"rank {rank.rank} of {len(ended)}", found, f"a message within {limit:.0f} s", ok))
    return rows


def run_part_on_ranks(part: str, device: str, path: Path) -> None:
    """Run one part as one of several ranks; rank 0 writes each row as soon as it is known."""
    with launched_ranks(device, LOST_TIMEOUT_S if part == "ranks_lost" else TIMEOUT_S) as (comm, rank_device):
        for row in check_of(RANKS_PARTS[part])(comm, rank_device):
            if comm.rank == 0:
                write(path, row)


def run_part(part: str, device: str) -> Iterator[Row]:
    """Run one part in this process and yield each row as soon as it is known."""
    name, _, kernel = part.partition(":")
    return check_of(PARTS[name])(*([kernel] if kernel else []), device)


def check_of(part: Part) -> Callable[..., Iterator[Row]]:
    module, _, function = part.check.partition(".")
    return getattr(importlib.import_module(f"gpu_checks.{module}"), function)


if __name__ == "__main__":
    sys.exit(main())
