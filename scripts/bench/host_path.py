"""Measure the time of the host for each block of a distributed attention: Python and launches, without the device.

    python scripts/bench/host_path.py [--ranks 8] [--repeats 50] [--out rows.jsonl]

One rank of a group runs on the CPU with tiny tensors, over PyTorch's fake process group: the transfers of the other
ranks are posted, and complete at once without data. A GPU is idle whenever a block takes the host longer than it.

"call" is a call of the function, which checks its arguments and plans the masks; "layer" is an attention layer of a
patched model, which plans once per pass. Rows have the median time of a block in microseconds of the processor, and the
function calls of Python and C for a block, which do not depend on the machine. The kernel is that of the CPU, whose own
share is in the column "kernel".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any
from unittest import mock

import harness
import report
import torch
import torch.distributed as dist
from harness import Row
from kernels import operands
from torch.testing._internal.distributed.fake_pg import FakeStore

from mllm_seqpar.attention import attend, executor, lv_xattn, ring_attention
from mllm_seqpar.kernels import FinalRows, choose_kernel

HEADS, GROUPS, ROWS, KEYS, DIM = 4, 2, 8, 16, 16
Run = tuple[Callable[[], Any] | None, Callable[[Any], Any]]
"""What is prepared before each repetition, and what is timed, given that."""
METHODS: dict[str, Callable[..., torch.Tensor]] = {"lv_xattn": lv_xattn, "ring_attention": ring_attention}


def main(argv: list[str] | None = None) -> None:
    harness.run(parse(argv), rows_of, table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=50, device=False)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args(argv)
    args.device, args.threads = "cpu", 1
    return args


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=args.ranks // 2, world_size=args.ranks)
    try:
        for name in METHODS:
            yield from measure(name, args)
    finally:
        dist.destroy_process_group()


def measure(name: str, args: argparse.Namespace) -> Iterator[Row]:
    q, k, v, do = operands((1, HEADS, GROUPS, ROWS, KEYS, DIM), "cpu", torch.float32)
    with mock.patch.object(attend, "distributed_forward", wraps=executor.distributed_forward) as spied:
        o = METHODS[name](q, k, v, group=dist.group.WORLD)
    comm, spec, block_math, *local = spied.call_args.args
    with torch.no_grad():
        o, lse = executor.distributed_forward(comm, spec, block_math, *local)
    kernel = choose_kernel("auto", q, k)[0]
    rows = FinalRows(local[0], o, lse, do)
    # With lv_xattn, rows of other ranks have delta and no o.
    of_block = rows._replace(o=None, delta=torch.zeros_like(lse)) if name == "lv_xattn" else rows

    def call() -> torch.Tensor:
        return METHODS[name](q, k, v, group=dist.group.WORLD)

    runs: dict[tuple[str, str], Run] = {
        ("call", "forward"): (None, lambda _: call()),
        ("call", "backward"): (call, lambda o: o.backward(do)),
        ("layer", "forward"): (None, lambda _: executor.distributed_forward(comm, spec, block_math, *local)),
        ("layer", "backward"): (
            None,
            lambda _: executor.distributed_backward(comm, spec, block_math, rows, *local[1:]),
        ),
        ("kernel", "forward"): (None, lambda _: kernel.forward(*local, scale=0.25)),
        ("kernel", "backward"): (None, lambda _: kernel.backward(of_block, *local[1:], scale=0.25)),
    }
    found = {}
    for key, (prepare, run) in runs.items():
        with torch.set_grad_enabled(key == ("call", "backward")):
            found[key] = timed(prepare, run, args.repeats)
    for what in ("call", "layer"):
        for direction in ("forward", "backward"):
            micros, calls = found[what, direction]
            row = {"method": name, "ranks": args.ranks, "what": what, "direction": direction}
            row |= {"block_us": micros / args.ranks, "kernel_us": found["kernel", direction][0]}
            yield row | {"calls": calls // args.ranks}


def timed(prepare: Callable[[], Any] | None, run: Callable[[Any], Any], repeats: int) -> tuple[float, int]:
    """Return the median time of `run(prepare())` in microseconds of this process, and its function calls."""
    prepare = prepare or (lambda: None)
    times = []
    for _ in range(3 + repeats):
        made = prepare()
        start = time.process_time()
        run(made)
        times.append(time.process_time() - start)
    made, calls = prepare(), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, which is the one that counts
        sys.setprofile(count)
        run(made)
        sys.setprofile(None)
    return 1e6 * median(times[3:]), calls


def table(rows: Sequence[Row]) -> str:
    columns = {
        "method": "method",
        "ranks": "ranks",
        "of": "what",
        "direction": "direction",
        "µs per block": "block_us .0f",
    }
    return report.table(rows, columns | {"of these, kernel": "kernel_us .0f", "calls per block": "calls"})


if __name__ == "__main__":
    main()
