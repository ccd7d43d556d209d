"""Checks on one CUDA GPU, in under 8 minutes, that what was built on CPU is right and fast there.

    python scripts/gpu_check.py [--json rows.jsonl]
    python scripts/gpu_check.py --device cpu        # a rehearsal: the same checks, tiny, without a GPU

Exactness of every CUDA kernel in bf16, fp16 and float32 against float64, and its speed against
`scaled_dot_product_attention`; all ranks of a ring in one process; memory with and without recomputation; a training
step of an mPLUG-Owl3 of real width. Each part runs in a process of its own, with a limit: a kernel that faults, hangs
or fails is a row of the table and hides no other. Exits 1 when a row failed. Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "bench"))  # measure.py and kernels.py, also for the parts

from gpu_checks.rows import Row, read, table, write

BUDGET_S = 450.0
"""For all parts together; what no longer fits is reported as not run."""
KERNELS = {
    "cuda": ["flash_attn", "cuda_flash", "cuda_cudnn", "cuda_efficient", "blocked_matmul"],
    "cpu": ["torch_cpu", "blocked_matmul"],
}
LIMITS_S = {"kernel": 75.0, "ring": 75.0, "memory": 75.0, "training": 120.0}


def main() -> int:
    """Run all parts, or in a child process the one that was asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a tiny rehearsal")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA GPU here, nothing was checked")
        return 0
    if args.part:
        run_part(args.part, args.device, args.json)
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
    """Run every part in a process of its own and return the rows of all."""
    rows: list[Row] = []
    start = time.monotonic()
    parts = [f"kernel:{name}" for name in KERNELS[device]] + ["ring", "memory", "training"]
    for part in parts:
        left = BUDGET_S - (time.monotonic() - start)
        limit = min(LIMITS_S[part.split(":")[0]], left)
        print(f"[{time.monotonic() - start:4.0f} s] {part}", flush=True)
        rows += run_child(part, device, limit) if limit > 10 else [Row(part, "", "not run: out of time", "", False)]
    return rows


def run_child(part: str, device: str, limit_s: float) -> list[Row]:
    """Run one part in a child process; return its rows, and one more when it did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        command = [sys.executable, __file__, "--device", device, "--part", part, "--json", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            problem = None if done.returncode == 0 else f"ended with {done.returncode}: {last_line(done.stderr)}"
        except subprocess.TimeoutExpired:
            problem = f"stopped after {limit_s:.0f} s"
        rows = read(path)
    return rows + ([Row(part, "", problem, "", False)] if problem else [])


def last_line(text: str) -> str:
    """Return the last line of an error output that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def run_part(part: str, device: str, path: Path) -> None:
    """Run one part here, writing each row as soon as it is known."""
    kind, _, name = part.partition(":")
    if kind == "kernel":
        from gpu_checks.kernels import check_kernel

        found = check_kernel(name, device)
    elif kind == "ring":
        from gpu_checks.ring import check_ring

        found = check_ring(device)
    elif kind == "memory":
        from gpu_checks.memory import check_memory

        found = check_memory(device)
    else:
        from gpu_checks.training import check_training

        found = check_training(device)
    for row in found:
        write(path, row)


if __name__ == "__main__":
    sys.exit(main())
