"""Measurement of this machine, for `strategy="auto"` without a cluster file and for `mllm-seqpar calibrate`.

All ranks measure at once, because they also share processors and links during training. The slowest rank counts, and
the result is the same on every rank. Sizes grow until a measurement is long enough to be meaningful, so that
calibration is quick on a slow machine and does not measure only latency on a fast one.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mllm_seqpar._compat import graph_task
from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator, Pending, Recv, Send, Subgroup
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.kernels import choose_kernel, kernel_names

from .cluster import Cluster

_log = get_logger(__name__)

MIN_SECONDS = 0.01
"""The duration that a measurement should have at least."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention to measure. The lengths are chosen to suit the machine."""

    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.float32
    kernel: str = "auto"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.heads} heads ({self.kv_heads} KV heads) of {self.dim}"


class Calibrations:
    """The clusters that a patched model measures: one for each device type and attention shape, on first use.

    A model may be patched on the CPU in float32 and run on a GPU in bf16, so nothing is measured before a forward pass
    asks for the rates of its own queries. A pass may ask for several shapes, such as those of cross-attention and of
    self-attention; the links are measured once for each device type.

    Args:
        comm: the group that measures.
        kernel: the block kernel of the model's attention, or "auto".
    """

    def __init__(self, comm: Communicator, kernel: str = "auto") -> None:
        self.comm, self.kernel = comm, kernel
        self._measured: dict[tuple[str, AttentionShape], Cluster] = {}

    def cluster(self, device: torch.device, shape: AttentionShape) -> Cluster:
        """Return the cluster for queries of `shape` on `device`. Collective when a shape is asked for first.

        All ranks of the group ask for the same shapes in the same order, because they run the same layers on inputs
        that they agreed on. A recomputation in the backward pass repeats attention of its forward pass, so it finds the
        shape measured.

        Raises:
            AgreementError: the ranks ask for different devices or shapes at the same time.
        """
        key = device.type, shape
        if key not in self._measured:
            # In backward, ranks may be in different layers: FSDP2 and DDP reduce gradients meanwhile.
            assert graph_task() == -1, f"calibration for {shape} was requested in a backward pass"
            agree(self.comm, "calibration", lambda: {"device": device.type, "shape": shape}, dict)
            known = next((cluster for (kind, _), cluster in self._measured.items() if kind == device.type), None)
            cluster = self._measured[key] = calibrate(self.comm, device=device, shape=shape, links_of=known)
            _log.info("calibrated: %s", _figures(cluster))
        return self._measured[key]


def calibrate(
    comm: Communicator,
    *,
    device: torch.device | str = "cpu",
    shape: AttentionShape | None = None,
    name: str = "measured",
    links_of: Cluster | None = None,
) -> Cluster:
    """Measure rates and links. Collective; takes less than half a second once connections are established.

    Returns the same Cluster on every rank. If all ranks share a node, the network is given the speed of the node's
    links, and the other way round if every rank has its own node. A single rank cannot measure links; `Cluster.links`
    records this.

    Args:
        comm: the group.
        device: where the ranks compute, and what they send from.
        shape: the attention to measure.
        name: the name of the cluster.
        links_of: a cluster that the same ranks have measured on the same device. Its links and memory are taken over,
            and only the rates of kernels are measured.
    """
    device, shape = torch.device(device), shape or AttentionShape()
    if comm.ring != tuple(range(comm.size)):
        comm = Subgroup(comm, comm.ring)  # neighbours as schedules choose them
    clock = _Clock(comm, device)
    # A forward pass may calibrate. Its autocast mode must not change the dtype of what is measured.
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        rates = _attention_rates(clock, shape) | {"matmul": _matmul_rate(clock, shape.dtype)}
        rates["memory_rate"] = _memory_rate(clock)
        source = f"measured: {comm.size} ranks on {device.type}, {shape}, torch {torch.__version__}"
        if links_of is not None:
            return replace(links_of, **rates, source=source)
        per_node = _ranks_per_node(comm.nodes)
        return Cluster(
            name=name,
            gpus_per_node=per_node,
            **rates,
            **_links(clock, per_node),
            memory_bytes=_memory(clock, per_node),
            links="none" if comm.size == 1 else "node" if comm.size == per_node else "all",
            source=source,
        )


def kernel_rates(comm: Communicator, *, device: torch.device | str, shape: AttentionShape) -> dict[str, float]:
    """Return the FLOP/s of each kernel in forward plus backward, at the slowest rank, the fastest kernel first.

    Collective. Kernels that some rank cannot run are left out.
    """
    clock = _Clock(comm, torch.device(device))
    rows, keys = (1024, 8192) if clock.device.type == "cuda" else (64, 256)
    flops = 14 * rows * keys * shape.heads * shape.dim
    rates = {}
    for name in kernel_names():
        problem = None
        try:
            forward, backward = _block(clock, replace(shape, kernel=name), rows, keys)
            backward()
            clock.synchronize()
        except Exception as error:  # whatever a package raises: the other ranks wait for this one
            problem = str(error)
            _log.debug("%s is not timed: %s", name, error)
        if all(row[0] for row in comm.gather_ints([int(problem is None)])):
            rates[name] = flops / (clock.seconds(forward) + clock.seconds(backward))
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


def _figures(cluster: Cluster) -> str:
    """Return what was measured as one line for the log."""
    rates = "attention forward {attention_forward:.3g}, backward {attention_backward:.3g}, matmul {matmul:.3g} FLOP/s"
    links = "links in a node {node_link:.3g}, between nodes {network_link:.3g} bytes/s"
    return f"{cluster.source}: {rates}; {links}".format(**vars(cluster))


class _Clock:
    """Times work on all ranks at once, and returns the time of the slowest rank on every rank."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm, self.device = comm, device

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        times = []
        for _ in range(repeats):
            self.barrier()
            begin = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return min(self.slowest(*times))

    def barrier(self) -> None:
        self.synchronize()
        self.comm.gather_ints([0])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, *seconds: float) -> list[float]:
        by_rank = self.comm.gather_ints([max(1, round(1e9 * value)) for value in seconds])
        return [max(column) / 1e9 for column in zip(*by_rank, strict=True)]


def _attention_rates(clock: _Clock, shape: AttentionShape) -> dict[str, Any]:
    rows, keys = (1024, 2048) if clock.device.type == "cuda" else (64, 256)
    while True:
        forward, backward = _block(clock, shape, rows, keys)
        seconds = clock.seconds(forward, 2)
        if seconds >= MIN_SECONDS / 2 or rows * keys >= 2**26:
            break
        keys *= 2 if seconds > MIN_SECONDS / 8 else 4
        rows = min(2 * rows, 4096)
    flops = rows * keys * shape.heads * shape.dim
    return {
        "attention_forward": 4 * flops / clock.seconds(forward),
        "attention_backward": 10 * flops / clock.seconds(backward),
        "block_overhead_s": clock.seconds(_block(clock, shape, 1, 1)[0]),
    }


def _block(
    clock: _Clock, shape: AttentionShape, rows: int, keys: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that compute one block forward and backward; the kernel has run once."""
    where: dict[str, Any] = {"device": clock.device, "dtype": shape.dtype}
    generator = torch.Generator(clock.device).manual_seed(0)
    q, do, k, v = (
        torch.randn(1, heads, length, shape.dim, generator=generator, **where)
        for heads, length in 2 * [(shape.heads, rows)] + 2 * [(shape.kv_heads, keys)]
    )
    kernel, _ = choose_kernel(shape.kernel, q, k, causal=False, masked=False)
    scale = shape.dim**-0.5
    o, lse = kernel.forward(q, k, v, scale=scale)
    o = o.to(q.dtype)
    return (lambda: kernel.forward(q, k, v, scale=scale), lambda: kernel.backward(do, q, k, v, o, lse, scale=scale))


def _matmul_rate(clock: _Clock, dtype: torch.dtype) -> float:
    size = 4096 if clock.device.type == "cuda" else 256
    a = torch.full((size, size), 0.5, device=clock.device, dtype=dtype)
    a @ a
    return 2 * size**3 / clock.seconds(lambda: a @ a)


def _memory_rate(clock: _Clock) -> float:
    """Return the bytes per second that a copy reads and writes."""
    a = torch.zeros(2**28 if clock.device.type == "cuda" else 2**24, dtype=torch.uint8, device=clock.device)
    b = a.clone()
    return 2 * a.numel() / clock.seconds(lambda: b.copy_(a))


class _Link(NamedTuple):
    """Bytes/s, seconds to the first byte, and seconds of posting a transfer."""

    rate: float
    latency: float
    overhead: float


def _links(clock: _Clock, per_node: int) -> dict[str, Any]:
    """Measure the links between neighbours, which carry both directions at once, as in a ring.

    Links between nodes are measured twice: all ranks of a node share its link; then only one rank of each node uses
    it, or uses its own, slower network card.
    """
    comm = clock.comm
    inside = outside = _Link(1e15, 0.0, 0.0)  # a single rank transfers nothing
    per_gpu: float | None = None
    if per_node > 1:
        first = comm.rank - comm.rank % per_node
        after, before = (first + (comm.rank - first + step) % per_node for step in (1, -1))
        inside = outside = _measure_link(clock, after, before)
    if comm.size > per_node:
        after, before = (comm.rank + per_node) % comm.size, (comm.rank - per_node) % comm.size
        outside = _measure_link(clock, after, before)
        outside = outside._replace(rate=outside.rate * per_node)
        if per_node == 1:
            inside = outside
        else:
            active = comm.rank % per_node == 0
            per_gpu = min(outside.rate, _measure_link(clock, after, before, active=active).rate)
    return {
        "node_link": inside.rate,
        "node_latency_s": inside.latency,
        "network_link": outside.rate,
        "network_latency_s": outside.latency,
        "network_link_per_gpu": per_gpu,
        "step_overhead_s": max(inside.overhead, outside.overhead),
    }


def _measure_link(clock: _Clock, after: int, before: int, *, active: bool = True) -> _Link:
    """Measure sending to rank `after` while receiving as much from rank `before`; inactive ranks only take part in
    the barriers."""
    comm = clock.comm

    def post(out: torch.Tensor, into: torch.Tensor) -> Pending:
        return comm.exchange(*(([Send(after, out, "calibration")], [Recv(before, into)]) if active else ([], [])))

    def buffers(size: int) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device=clock.device) for _ in range(2)]

    small = buffers(8)
    post(*small).wait()  # establishes the connection
    round_trip = clock.seconds(lambda: post(*small).wait(), 5)
    postings = []
    for _ in range(5):
        clock.barrier()
        begin = time.perf_counter()
        pending = post(*small)
        postings.append(time.perf_counter() - begin)
        pending.wait()
    posting = min(round_trip, *clock.slowest(*postings))
    size, limit = 2**18, 2**28 if clock.device.type == "cuda" else 2**24
    while True:
        large = buffers(size)
        post(*large).wait()
        seconds = clock.seconds(lambda large=large: post(*large).wait(), 3)  # type: ignore[misc]
        if seconds >= max(MIN_SECONDS, 10 * round_trip) or size >= limit:
            break
        size *= 4
    return _Link(size / max(seconds - round_trip, seconds / 10), round_trip - posting, posting)


def _ranks_per_node(nodes: Sequence[int]) -> int:
    """Return the ranks per node if it is the same for all nodes, else 1: all links then count as network."""
    counts = {nodes.count(node) for node in nodes}
    return counts.pop() if len(counts) == 1 else 1


def _memory(clock: _Clock, per_node: int) -> float:
    if clock.device.type == "cuda":
        size = torch.cuda.get_device_properties(clock.device).total_memory
    else:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    return float(min(row[0] for row in clock.comm.gather_ints([size])))
