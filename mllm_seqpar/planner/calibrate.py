"""Measurement of this machine, for `strategy="auto"` without a cluster file and for `mllm-seqpar calibrate`.

All ranks measure at once, because they also share processors and links during training. The slowest rank counts, and
the result is the same on every rank. Sizes grow until a measurement is long enough to be meaningful, so that
calibration is quick on a slow machine and does not measure only latency on a fast one.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator, Pending, Recv, Send, Subgroup
from mllm_seqpar.kernels import FinalRows, KernelOption, KernelRate, choose_kernel, kernel_names
from mllm_seqpar.masks import Intervals

from .cluster import ATTENTION_FLOPS, Cluster

_log = get_logger(__name__)

TOWER = {"width": 1152, "heads": 16, "inner": 4304, "tokens": 729, "frames": 16}
"""The layer of a vision tower whose rate is measured on a GPU: that of SigLIP-so400m, on frames of 378 pixels."""

BLOCK = {"cuda": (2048, 128, 512), "cpu": (64, 16, 16)}
"""Rows, frames and keys per frame of the block that all kernels, and masks, are measured with."""

HEAD_DIMS = (64, 128)
"""The head dims that all kernels are measured with, beside that of the shape."""

MIN_SECONDS = 0.01
"""The duration that a measurement should have at least."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention to measure. The lengths are chosen to suit the machine."""

    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.float32
    kernel: KernelOption = "auto"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.heads} heads ({self.kv_heads} KV heads) of {self.dim}"


def calibrate(
    comm: Communicator,
    *,
    device: torch.device | str = "cpu",
    shape: AttentionShape | None = None,
    name: str = "measured",
    links_of: Cluster | None = None,
) -> Cluster:
    """Measure rates and links; return the same Cluster on every rank. Collective; takes less than half a second once
    connections are established.

    If all ranks share a node, the network is given the speed of the node's links, and the other way round if every
    rank has its own node. A single rank cannot measure links; `Cluster.links` records this. `links_of` is a cluster
    that the same ranks have measured on the same device, whose links and memory are taken over.
    """
    if comm.ring != tuple(range(comm.size)):
        comm = Subgroup(comm, comm.ring)  # neighbours as schedules choose them
    meter = _Meter(comm, torch.device(device), shape or AttentionShape())
    # A forward pass may calibrate. Its autocast mode must not change the dtype of what is measured.
    with torch.no_grad(), torch.autocast(meter.device.type, enabled=False):
        rates = meter.rates()
        ranks = f"{comm.size} rank{'s' * (comm.size != 1)}"
        source = f"measured: {ranks} on {meter.device.type}, {meter.shape}, torch {torch.__version__}"
        if links_of is not None:
            return replace(links_of, **rates, source=source)
        counts = {comm.nodes.count(node) for node in comm.nodes}
        per_node = counts.pop() if len(counts) == 1 else 1  # nodes of several sizes: all links count as network
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
        if meter.on_gpu:
            memory = torch.cuda.get_device_properties(meter.device).total_memory
        return Cluster(
            name=name,
            gpus_per_node=per_node,
            **rates,
            **meter.links(per_node),
            memory_bytes=float(min(row[0] for row in comm.gather_ints([memory]))),
            links="none" if comm.size == 1 else "node" if comm.size == per_node else "all",
            source=source,
        )


def kernel_rates(comm: Communicator, *, device: torch.device | str, shape: AttentionShape) -> tuple[KernelRate, ...]:
    """Return the rate of each kernel at the slowest rank, without and with a mask, by head dim; the fastest first.

    The head dims are that of `shape` and HEAD_DIMS. Collective. Kernels that some rank cannot run are left out.
    """
    device, rates = torch.device(device), []
    rows, frames, tokens = BLOCK[device.type]
    for dim, masked, name in product(sorted({shape.dim, *HEAD_DIMS}), (False, True), kernel_names()):
        meter, block = _Meter(comm, device, replace(shape, dim=dim, kernel=name)), None
        mask = stairs(rows, frames, tokens) if masked else None
        try:
            block = meter.block(rows, frames * tokens, mask)
            block.backward()
            meter.synchronize()
        except Exception as error:  # whatever a package raises: the other ranks wait for this one
            block = None
            _log.debug("%s is not timed: %s", name, error)
        timed = block is not None and block.kernel == name  # masks of other kernels fall back
        if all(row[0] for row in comm.gather_ints([int(timed)])):
            assert block is not None
            rates.append(KernelRate(name, dim, masked, *(float(f"{rate:.4g}") for rate in meter.rates_of(block))))
    return tuple(sorted(rates, key=lambda rate: (rate.dim, rate.masked, rate.seconds)))


def stairs(rows: int, frames: int, tokens: int) -> Intervals:
    """Return a mask in which rows see the frames before them: as many rows see one frame more, up to all frames."""
    high = torch.arange(rows)[None] * (frames + 1) // rows * tokens
    return Intervals(torch.zeros_like(high), high, frames * tokens)


class _Block(NamedTuple):
    """The attention of a block, and functions that compute it."""

    kernel: str
    forward: Callable[[], object]
    backward: Callable[[], object]
    work: int  # visible entries x heads x head dim


class _Link(NamedTuple):
    rate: float  # bytes/s
    latency: float  # seconds to the first byte
    overhead: float  # seconds of posting a transfer


class _Meter:
    """Measures on all ranks at once, and returns the result of the slowest rank on every rank."""

    def __init__(self, comm: Communicator, device: torch.device, shape: AttentionShape) -> None:
        self.comm, self.device, self.shape = comm, device, shape
        self.on_gpu = device.type == "cuda"

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
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def slowest(self, *seconds: float) -> list[float]:
        by_rank = self.comm.gather_ints([max(1, round(1e9 * value)) for value in seconds])
        return [max(column) / 1e9 for column in zip(*by_rank, strict=True)]

    def rates(self) -> dict[str, Any]:
        """Return the rates of kernels as fields of Cluster."""
        shape, (rows, keys) = self.shape, (1024, 2048) if self.on_gpu else (64, 256)
        while True:
            block = self.block(rows, keys)
            seconds = self.seconds(block.forward, 2)
            if seconds >= MIN_SECONDS / 2 or rows * keys >= 2**26:
                break
            keys *= 2 if seconds > MIN_SECONDS / 8 else 4
            rows = min(2 * rows, 4096)
        size = 4096 if self.on_gpu else 256
        a = torch.full((size, size), 0.5, device=self.device, dtype=shape.dtype)
        a @ a
        copied = torch.zeros(2**28 if self.on_gpu else 2**24, dtype=torch.uint8, device=self.device)
        copy = copied.clone()
        forward, backward = self.rates_of(block)
        measured = {"attention_forward": forward, "attention_backward": backward}
        if self.on_gpu:
            rows, frames, tokens = BLOCK["cuda"]
            forward, backward = self.rates_of(self.block(rows, frames * tokens, stairs(rows, frames, tokens)))
            measured |= {"masked_forward": forward, "masked_backward": backward, "tower": self.tower_rate(**TOWER)}
        return measured | {
            "block_overhead_s": self.seconds(self.block(1, 1).forward),
            "matmul": 2 * size**3 / self.seconds(lambda: a @ a),
            "memory_rate": 2 * copied.numel() / self.seconds(lambda: copy.copy_(copied)),  # bytes read and written
        }

    def rates_of(self, block: _Block) -> tuple[float, float]:
        """Return FLOP/s forward and backward."""
        forward, backward = (flops * block.work for flops in ATTENTION_FLOPS)
        return forward / self.seconds(block.forward), backward / self.seconds(block.backward)

    def block(self, rows: int, keys: int, mask: Intervals | None = None) -> _Block:
        """Return a block of random rows and keys; its kernel has run forward once."""
        shape, generator = self.shape, torch.Generator(self.device).manual_seed(0)
        where: dict[str, Any] = {"device": self.device, "dtype": shape.dtype}
        q, do, k, v = (
            torch.randn(1, heads, length, shape.dim, generator=generator, **where)
            for heads, length in 2 * [(shape.heads, rows)] + 2 * [(shape.kv_heads, keys)]
        )
        kernel, _ = choose_kernel(shape.kernel, q, k, mask)
        options: dict[str, Any] = {"scale": shape.dim**-0.5, "intervals": mask}
        o, lse = kernel.forward(q, k, v, **options)
        final, entries = FinalRows(q, o.to(q.dtype), lse, do), rows * keys if mask is None else mask.visible
        return _Block(
            kernel.name,
            lambda: kernel.forward(q, k, v, **options),
            lambda: kernel.backward(final, k, v, **options),
            entries * shape.heads * shape.dim,
        )

    def tower_rate(self, width: int, heads: int, inner: int, tokens: int, frames: int) -> float:
        """Return the FLOP/s of a layer of a vision tower."""
        where: dict[str, Any] = {"device": self.device, "dtype": self.shape.dtype}
        x = torch.full((frames, tokens, width), 0.5, **where)
        sizes = (3 * width, width), (width, width), (inner, width), (width, inner)
        qkv, out, up, down = (torch.full(size, 1e-3, **where) for size in sizes)

        def layer() -> Tensor:
            y = F.linear(F.layer_norm(x, (width,)), qkv).view(frames, tokens, 3 * heads, -1).transpose(1, 2)
            q, k, v = y.chunk(3, 1)
            o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            z = x + F.linear(o, out)
            return z + F.linear(F.gelu(F.linear(F.layer_norm(z, (width,)), up), approximate="tanh"), down)

        layer()
        flops = 2 * sum(a * b for a, b in sizes) + 4 * tokens * width
        return frames * tokens * flops / self.seconds(layer)

    def links(self, per_node: int) -> dict[str, Any]:
        """Measure the links between neighbours, which carry both directions at once, as in a ring.

        Links between nodes are measured twice: all ranks of a node share its link; then only one rank of each node uses
        it, or uses its own, slower network card.
        """
        rank, size = self.comm.rank, self.comm.size
        inside = outside = _Link(1e15, 0.0, 0.0)  # a single rank transfers nothing
        per_gpu: float | None = None
        if per_node > 1:
            first = rank - rank % per_node
            after, before = (first + (rank - first + step) % per_node for step in (1, -1))
            inside = outside = self.link(after, before)
        if size > per_node:
            after, before = (rank + per_node) % size, (rank - per_node) % size
            outside = self.link(after, before)
            outside = outside._replace(rate=outside.rate * per_node)
            if per_node == 1:
                inside = outside
            else:
                per_gpu = min(outside.rate, self.link(after, before, active=rank % per_node == 0).rate)
        return {
            "node_link": inside.rate,
            "node_latency_s": inside.latency,
            "network_link": outside.rate,
            "network_latency_s": outside.latency,
            "network_link_per_gpu": per_gpu,
            "step_overhead_s": max(inside.overhead, outside.overhead),
        }

    def link(self, after: int, before: int, *, active: bool = True) -> _Link:
        """Measure sending to rank `after` while receiving as much from rank `before`; inactive ranks only take part in
        the barriers."""

        def exchange(size: int) -> Callable[[], Pending]:
            """Return a function that posts one exchange; the connection is established."""
            out, into = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
            moved = ([Send(after, out, "calibration")], [Recv(before, into)]) if active else ([], [])
            self.comm.exchange(*moved).wait()
            return lambda: self.comm.exchange(*moved)

        def exchanging(post: Callable[[], Pending], repeats: int) -> float:
            return self.seconds(lambda: post().wait(), repeats)

        post, postings = exchange(8), []
        round_trip = exchanging(post, 5)
        for _ in range(5):
            self.barrier()
            begin = time.perf_counter()
            pending = post()
            postings.append(time.perf_counter() - begin)
            pending.wait()
        posting = min(round_trip, *self.slowest(*postings))
        size, limit = 2**18, 2**28 if self.on_gpu else 2**24
        while (seconds := exchanging(exchange(size), 3)) < max(MIN_SECONDS, 10 * round_trip) and size < limit:
            size *= 4
        return _Link(size / max(seconds - round_trip, seconds / 10), round_trip - posting, posting)
