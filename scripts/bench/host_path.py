"""Measure the time of the host for each block of a distributed attention: Python and launches, without the device.

    python scripts/bench/host_path.py [--ranks 8] [--repeats 50] [--out rows.jsonl]

One rank of a group runs on the CPU with tiny tensors, over PyTorch's fake process group: the transfers of the other
ranks are posted, and complete at once without data. A GPU is idle whenever a block takes the host longer than it. Rows
have the median time of a block in microseconds, and the function calls of Python and C for a block, which do not depend
on the machine. The kernel is that of the CPU (its own share is in the column "kernel"); on a GPU, a block has about as
many launches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import harness
import report
import torch
import torch.distributed as dist
from harness import Row
from torch.testing._internal.distributed.fake_pg import FakeStore

from mllm_seqpar.attention import lv_xattn, ring_attention
from mllm_seqpar.kernels import choose_kernel

HEADS, GROUPS, ROWS, KEYS, DIM = 4, 2, 8, 16, 16
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
            for direction in ("forward", "backward"):
                yield measure(name, direction, args)
    finally:
        dist.destroy_process_group()


def measure(name: str, direction: str, args: argparse.Namespace) -> Row:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, ROWS, DIM, generator=g, requires_grad=True)
    k, v = (torch.randn(1, GROUPS, KEYS, DIM, generator=g, requires_grad=True) for _ in range(2))
    kernel, _ = choose_kernel("auto", q, k)
    o, lse = kernel.forward(q.detach(), k.detach(), v.detach(), scale=0.25)
    do = torch.ones_like(o)

    def forward() -> torch.Tensor:
        return METHODS[name](q, k, v, group=dist.group.WORLD)

    if direction == "forward":
        with torch.no_grad():
            whole, calls = timed(lambda: None, lambda _: forward(), args.repeats)
            alone, _ = timed(lambda: None, lambda _: kernel.forward(q, k, v, scale=0.25), args.repeats)
    else:
        whole, calls = timed(forward, lambda o: o.backward(do), args.repeats)
        given = (None, lse) if name == "lv_xattn" else (o, lse)  # rows of other ranks have no o
        options: dict[str, Any] = {"scale": 0.25, "delta": torch.zeros_like(lse)}
        with torch.no_grad():
            alone, _ = timed(lambda: None, lambda _: kernel.backward(do, q, k, v, *given, **options), args.repeats)
    row = {"method": name, "ranks": args.ranks, "direction": direction}
    return row | {"block_us": whole / args.ranks, "kernel_us": alone, "calls": calls // args.ranks}


def timed(prepare: Callable[[], Any], run: Callable[[Any], Any], repeats: int) -> tuple[float, int]:
    """Return the median time of `run(prepare())` in microseconds of this process, and its function calls."""
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
    columns = {"method": "method", "ranks": "ranks", "direction": "direction", "µs per block": "block_us .0f"}
    return report.table(rows, columns | {"of these, kernel": "kernel_us .0f", "calls per block": "calls"})


if __name__ == "__main__":
    main()
