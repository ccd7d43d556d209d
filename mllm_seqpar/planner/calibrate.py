"""Measuring the machine at hand: what `strategy="auto"` decides by where no cluster file is given, and `calibrate`.

All ranks measure at once, since they share processors and links when they work too, and the slowest counts; the result
is the same on every rank. Sizes grow until a measurement is long enough to mean something, so a slow machine is not
kept waiting and a fast one is not timed at its latency.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mllm_seqpar.comm import Communicator, Pending, Recv, Send
from mllm_seqpar.comm.agreement import fingerprint
from mllm_seqpar.kernels import choose_kernel

from .cluster import Cluster

LONG_ENOUGH = 0.01
"""Seconds that a measurement should take at least."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The attention to measure: its heads, channels and dtype; the lengths are chosen to suit the machine."""

    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.float32
    kernel: str = "auto"


def calibrate(
    comm: Communicator, *, device: torch.device | str = "cpu", shape: Shape | None = None, name: str = "measured"
) -> Cluster:
    """Measures rates and links; collective. Below half a second, but for connections that are not yet set up.

    Args:
        comm: the ranks to measure.
        device: where computation runs, and where what is sent lies.
        shape: the attention to measure.
        name: of the cluster.

    Returns:
        The same Cluster on every rank. Where all ranks share a node, the network is taken to be as fast as the node's
        links; where each has its own, the other way round. One rank alone has none to measure, and the Cluster says so.
    """
    device, shape = torch.device(device), shape or Shape()
    clock = _Clock(comm, device)
    per_node = _ranks_per_node(comm)
    forward, backward, overhead = _attention(clock, shape)
    links = _links(clock, per_node)
    return Cluster(
        name=name,
        gpus_per_node=per_node,
        attention_forward=forward,
        attention_backward=backward,
        matmul=_matmul(clock, shape.dtype),
        memory_bytes=_memory(clock, per_node),
        block_overhead_s=overhead,
        **links,
        links="none" if comm.size == 1 else "node" if comm.size == per_node else "all",
        source=f"measured: {comm.size} ranks on {device.type}, {str(shape.dtype).removeprefix('torch.')}, "
        f"{shape.heads} heads of {shape.dim}, torch {torch.__version__}",
    )


class _Clock:
    """Times things on all ranks at once; what it returns is the slowest rank's, the same everywhere."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm, self.device = comm, device

    def seconds(self, run: Callable[[], object], repeats: int = 3) -> float:
        """The least of several times; of each, the slowest rank's."""
        times = []
        for _ in range(repeats):
            self.together()
            begin = time.perf_counter()
            run()
            self.settle()
            times.append(time.perf_counter() - begin)
        return min(self.slowest(*times))

    def settle(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def together(self) -> None:
        """Lets ranks start at the same time."""
        self.settle()
        self.comm.gather_ints([0])

    def slowest(self, *seconds: float) -> list[float]:
        """Each of these times, of the slowest rank."""
        everyone = self.comm.gather_ints([max(1, round(1e9 * value)) for value in seconds])
        return [max(column) / 1e9 for column in zip(*everyone, strict=True)]


def _attention(clock: _Clock, shape: Shape) -> tuple[float, float, float]:
    """Rates of block attention forward and backward, and the cost of the smallest block."""
    rows, keys = (1024, 2048) if clock.device.type == "cuda" else (64, 256)
    while True:
        ways = _block(clock, shape, rows, keys)
        once = clock.seconds(ways[0], 2)
        if once >= LONG_ENOUGH / 2 or rows * keys >= 2**26:
            break
        keys *= 2 if once > LONG_ENOUGH / 8 else 4
        rows = min(2 * rows, 4096)
    flops = rows * keys * shape.heads * shape.dim
    forward, backward = (clock.seconds(way) for way in ways)
    smallest = clock.seconds(_block(clock, shape, 1, 1)[0])
    return 4 * flops / forward, 10 * flops / backward, smallest


def _block(clock: _Clock, shape: Shape, rows: int, keys: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Computing one block forward, and backward, warmed up."""
    numbers = torch.Generator().manual_seed(0)

    def tensor(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, shape.dim, generator=numbers).to(clock.device, shape.dtype)

    q, k, v, do = (
        tensor(heads, length)
        for heads, length in ((shape.heads, rows), (shape.kv_heads, keys), (shape.kv_heads, keys), (shape.heads, rows))
    )
    kernel, _ = choose_kernel(shape.kernel, q, k, causal=False, masked=False)
    scale = shape.dim**-0.5
    o, lse = kernel.forward(q, k, v, scale=scale)
    o = o.to(q.dtype)

    def forward() -> object:
        return kernel.forward(q, k, v, scale=scale)

    def backward() -> object:
        return kernel.backward(do, q, k, v, o, lse, scale=scale)

    return forward, backward


def _matmul(clock: _Clock, dtype: torch.dtype) -> float:
    size = 4096 if clock.device.type == "cuda" else 256
    a = torch.full((size, size), 0.5, device=clock.device, dtype=dtype)
    a @ a
    return 2 * size**3 / clock.seconds(lambda: a @ a)


def _links(clock: _Clock, per_node: int) -> dict[str, Any]:
    """Speeds and latencies between neighbours; a link carries both directions at once, as in a ring.

    Between nodes twice: all ranks at once share the node's link, one rank of each node has it to itself, or a network
    card of its own that is slower.
    """
    comm, nodes = clock.comm, clock.comm.size // per_node
    inside = outside = _Link(1e15, 0.0, 0.0)  # one rank alone: nothing to move, nothing to wait for
    alone: float | None = None
    if per_node > 1:
        first = comm.rank - comm.rank % per_node
        after, before = (first + (comm.rank - first + step) % per_node for step in (1, -1))
        inside = outside = _link(clock, after, before)
    if nodes > 1:
        after, before = (comm.rank + per_node) % comm.size, (comm.rank - per_node) % comm.size
        outside = _link(clock, after, before)
        outside = _Link(outside.rate * per_node, outside.latency, outside.overhead)
        if per_node == 1:
            inside = outside
        else:
            alone = min(outside.rate, _link(clock, after, before, active=comm.rank % per_node == 0).rate)
    return {
        "node_link": inside.rate,
        "node_latency_s": inside.latency,
        "network_link": outside.rate,
        "network_latency_s": outside.latency,
        "network_link_per_gpu": alone,
        "step_overhead_s": max(inside.overhead, outside.overhead),
    }


@dataclass(frozen=True)
class _Link:
    rate: float
    latency: float
    overhead: float


def _link(clock: _Clock, after: int, before: int, *, active: bool = True) -> _Link:
    """The link to rank `after`, while as much comes from rank `before`; ranks that are not active only keep time."""
    comm = clock.comm

    def post(out: torch.Tensor, into: torch.Tensor) -> Pending:
        return comm.exchange(*(([Send(after, out, "calibration")], [Recv(before, into)]) if active else ([], [])))

    def exchange(out: torch.Tensor, into: torch.Tensor) -> None:
        post(out, into).wait()

    def buffers(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.zeros(size, dtype=torch.uint8, device=clock.device) for _ in range(2))  # type: ignore[return-value]

    small = buffers(8)
    exchange(*small)  # sets up the connection
    least = clock.seconds(lambda: exchange(*small), 5)
    postings = []
    for _ in range(5):
        clock.together()
        begin = time.perf_counter()
        pending = post(*small)
        postings.append(time.perf_counter() - begin)
        pending.wait()
    posting = min(least, *clock.slowest(*postings))
    size, limit = 2**18, 2**28 if clock.device.type == "cuda" else 2**24
    while True:
        large = buffers(size)
        exchange(*large)
        seconds = clock.seconds(lambda large=large: exchange(*large), 3)  # type: ignore[misc]
        if seconds >= max(LONG_ENOUGH, 10 * least) or size >= limit:
            break
        size *= 4
    return _Link(size / max(seconds - least, seconds / 10), least - posting, posting)


def _ranks_per_node(comm: Communicator) -> int:
    """Ranks of a node, where nodes hold equally many neighbouring ranks; otherwise 1: all is between nodes."""
    hosts = [row[0] for row in comm.gather_ints([fingerprint(socket.gethostname())])]
    count = hosts.count(hosts[0])
    runs = [hosts[i : i + count] for i in range(0, len(hosts), count)]
    regular = all(len(run) == count and len(set(run)) == 1 for run in runs) and len({run[0] for run in runs}) == len(
        runs
    )
    return count if regular else 1


def _memory(clock: _Clock, per_node: int) -> float:
    if clock.device.type == "cuda":
        size = torch.cuda.get_device_properties(clock.device).total_memory
    else:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    return float(min(row[0] for row in clock.comm.gather_ints([size])))
