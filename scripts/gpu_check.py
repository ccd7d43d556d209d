"""Check on one or several CUDA GPUs, in under 8 minutes, that the code, which was developed on CPUs, is correct and
fast there.

    python scripts/gpu_check.py [--json rows.jsonl]
    torchrun --standalone --nproc-per-node N scripts/gpu_check.py --ranks [--json rows.jsonl]
    python scripts/gpu_check.py --device cpu        # a rehearsal: the same checks with tiny sizes, without a GPU

With one GPU the checks are: every CUDA kernel in bf16, fp16 and float32 against float64, and its speed against
`scaled_dot_product_attention`; the kernel that "auto" takes; host synchronisations; every distributed algorithm with
all ranks in one process; memory with and without recomputation; a training step of an mPLUG-Owl3 with the real width.

With --ranks, on N GPUs of one node over NCCL (on the CPU: over gloo): every distributed algorithm against float64; the
times with and without overlap, and how much of the transfers the attention kernels hide; two steps under FSDP2 against
one device, also with accelerate's `prepare`, bf16 and gradient checkpointing, and of two groups with a batch each;
reserved memory, streams and host synchronisations; the end of all ranks after one was killed.

Each part runs in processes of its own with a time limit, so a kernel that crashes, hangs or fails becomes a row of the
table and the other parts still run. The exit status is 1 if a row failed, and 2 if the launch cannot be checked.
Without a GPU the script says so and exits with 0.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "bench"))  # for harness.py and kernels.py
sys.path.append(str(Path(__file__).parent / "lib"))  # for tiny_models

from gpu_checks import ranks_lost
from gpu_checks.processes import refusal, run_ranks
from gpu_checks.rows import Row, read, table, write

from mllm_seqpar.cli import program_exit
from mllm_seqpar.cli.launch import launched_ranks

BUDGET_S = 450.0
"""Time of all parts together; parts that no longer fit are reported as not run."""
KERNELS = {
    "cuda": [
        *("flash_attn_3", "flash_attn_4", "flash_attn", "cuda_flash@FA3", "cuda_flash@FA4"),
        *("cuda_flash", "cuda_efficient", "blocked_matmul"),
    ],
    "cpu": ["torch_cpu", "blocked_matmul"],
}
LIMITS_S = {"kernels": 75.0, "one_gpu": 75.0, "ring": 75.0, "memory": 75.0, "training": 120.0}
"""Time limit of each part. A part is a module of `gpu_checks` with a function `check`; "kernels" runs once a kernel."""
RANKS_LIMITS_S = {"ranks_groups": 100.0, "ranks_attention": 150.0, "ranks_training": 150.0, "ranks_fsdp": 150.0}
RANKS_LIMITS_S |= {"ranks_lost": 150.0}
"""Time limit of each part of --ranks; its `check` runs in one process per rank."""
TIMEOUT_S = 60.0
"""Time limit of the ranks' process group; in the part "ranks_lost" its own."""


def main() -> int:
    """Run all parts, or the one that was asked for in a child process; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal with tiny sizes")
    parser.add_argument("--ranks", action="store_true", help="check all ranks that torchrun started on this node")
    parser.add_argument("--parts", nargs="+", choices=[*LIMITS_S, *RANKS_LIMITS_S], help="only these parts")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks and not args.part and os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # local rank 0 starts all processes of each part itself, so that no part can break the next one
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA GPU here, nothing was checked")
        return 0
    if args.part and args.ranks:
        program_exit.run(lambda argv: run_part_on_ranks(args.part, args.device, args.json), [])
        return 0
    if args.part:
        for row in run_part(args.part, args.device):
            write(args.json, row)
        return 0
    problem = refusal(args.device, torch.cuda.device_count()) if args.ranks else None
    if problem:
        print(f"gpu_check: {problem}")
        return 2
    from harness import print_environment

    print_environment(args.device)
    rows = (
        run_all_on_ranks(args.device, int(os.environ["LOCAL_WORLD_SIZE"]), args.parts)
        if args.ranks
        else run_all(args.device, args.parts)
    )
    print(table(rows))
    if args.json:
        args.json.unlink(missing_ok=True)
        for row in rows:
            write(args.json, row)
    return 1 if any(row.ok is False for row in rows) else 0


def run_all(device: str, only: Sequence[str] | None = None) -> list[Row]:
    """Run every part (or those of `only`) in a process of its own and return the rows."""
    rows: list[Row] = []
    start = time.monotonic()
    for part in [f"kernels:{name}" for name in KERNELS[device]] + ["one_gpu", "ring", "memory", "training"]:
        if only and part.split(":")[0] not in only:
            continue
        elapsed = time.monotonic() - start
        limit = min(LIMITS_S[part.split(":")[0]], BUDGET_S - elapsed)
        print(f"[{elapsed:4.0f} s] {part}", flush=True)
        rows += run_child(part, device, limit) if limit > 10 else [Row(part, "", "not run: out of time", "", False)]
    return rows


def run_child(part: str, device: str, limit_s: float, ranks: int = 0) -> list[Row]:
    """Run one part in a child process, or one of --ranks in one per rank; return its rows, and one more for each
    process that failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        command = [sys.executable, __file__, "--device", device, "--part", part, "--json", str(path)]
        command += ["--ranks"] if ranks else []
        if part == "ranks_lost":  # here the ranks must fail, and without help
            return ranks_lost.rows_of(run_ranks(command, ranks, limit_s, grace_s=limit_s), device)
        ended = run_ranks(command, ranks or 1, limit_s)
        rows = read(path)
    return rows + [Row(part, "", rank.problem, "", False) for rank in ended if rank.problem]


def run_all_on_ranks(device: str, ranks: int, only: Sequence[str] | None = None) -> list[Row]:
    """Run every part of --ranks (or those of `only`) and return the rows."""
    rows: list[Row] = []
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # torchrun's; it then kills the ranks of the current part
    for part, limit in RANKS_LIMITS_S.items():
        if only and part not in only:
            continue
        print(f"[{time.monotonic() - start:4.0f} s] {part}", flush=True)
        rows += run_child(part, device, limit, ranks)
    return rows


def run_part_on_ranks(part: str, device: str, path: Path) -> None:
    """Run one part as one of several ranks; rank 0 writes each row as soon as it is known."""
    timeout = ranks_lost.TIMEOUT_S if part == "ranks_lost" else TIMEOUT_S
    with launched_ranks(device, timeout) as (comm, rank_device):
        for row in importlib.import_module(f"gpu_checks.{part}").check(comm, rank_device):
            if comm.rank == 0:
                write(path, row)


def run_part(part: str, device: str) -> Iterator[Row]:
    """Run one part in this process and yield each row as soon as it is known."""
    module, _, kernel = part.partition(":")
    return importlib.import_module(f"gpu_checks.{module}").check(*([kernel] if kernel else []), device)


if __name__ == "__main__":
    sys.exit(main())
