"""Check on one CUDA GPU, in under 8 minutes, that what was built on a CPU is correct and fast there.

    python scripts/gpu_check.py [--json rows.jsonl]
    python scripts/gpu_check.py --device cpu        # a rehearsal: the same checks with tiny sizes, without a GPU

The checks are: every CUDA kernel in bf16, fp16 and float32 against float64, and its speed against
`scaled_dot_product_attention`; every distributed algorithm with all ranks in one process; memory with and without
recomputation; a training step of an mPLUG-Owl3 with the real width. Each part runs in a process of its own with a time
limit, so a kernel that crashes, hangs or fails becomes a row of the table and the other parts still run. The exit
status is 1 if a row failed. Without a GPU the script says so and exits with 0.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "bench"))  # for measure.py and kernels.py

from gpu_checks.rows import Row, read, table, write

BUDGET_S = 450.0
"""Time of all parts together; parts that no longer fit are reported as not run."""
KERNELS = {
    "cuda": [
        *("flash_attn_3", "flash_attn_4", "flash_attn"),
        *("cuda_flash", "cuda_cudnn", "cuda_efficient", "blocked_matmul"),
    ],
    "cpu": ["torch_cpu", "blocked_matmul"],
}
LIMITS_S = {"kernels": 75.0, "ring": 75.0, "memory": 75.0, "training": 120.0}
"""Time limit of each part. A part is a module of `gpu_checks` with a function `check`; "kernels" runs once a kernel."""


def main() -> int:
    """Run all parts, or the one that was asked for in a child process; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal with tiny sizes")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA GPU here, nothing was checked")
        return 0
    if args.part:
        for row in run_part(args.part, args.device):
            write(args.json, row)
        return 0
    from measure import environment

    print(", ".join(f"{key} {value}" for key, value in environment(args.device).items()), flush=True)
    rows = run_all(args.device)
    print(table(rows))
    if args.json:
        args.json.unlink(missing_ok=True)
        for row in rows:
            write(args.json, row)
    return 1 if any(row.ok is False for row in rows) else 0


def run_all(device: str) -> list[Row]:
    """Run every part in a process of its own and return the rows of all parts."""
    rows: list[Row] = []
    start = time.monotonic()
    for part in [f"kernels:{name}" for name in KERNELS[device]] + ["ring", "memory", "training"]:
        elapsed = time.monotonic() - start
        limit = min(LIMITS_S[part.split(":")[0]], BUDGET_S - elapsed)
        print(f"[{elapsed:4.0f} s] {part}", flush=True)
        rows += run_child(part, device, limit) if limit > 10 else [Row(part, "", "not run: out of time", "", False)]
    return rows


def run_child(part: str, device: str, limit_s: float) -> list[Row]:
    """Run one part in a child process; return its rows, and one more if the process failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        command = [sys.executable, __file__, "--device", device, "--part", part, "--json", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            message = ([line for line in done.stderr.splitlines() if line.strip()] or ["no message"])[-1][:200]
            problem = None if done.returncode == 0 else f"ended with status {done.returncode}: {message}"
        except subprocess.TimeoutExpired:
            problem = f"stopped after {limit_s:.0f} s"
        rows = read(path)
    return rows + ([Row(part, "", problem, "", False)] if problem else [])


def run_part(part: str, device: str) -> Iterator[Row]:
    """Run one part in this process and yield each row as soon as it is known."""
    module, _, kernel = part.partition(":")
    return importlib.import_module(f"gpu_checks.{module}").check(*([kernel] if kernel else []), device)


if __name__ == "__main__":
    sys.exit(main())
