"""Timing of one setting on the ranks of a group: every mode, in a changing order, and each timed run is checked."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from harness import rounds, slowest_rank, synchronize
from namespaces import LINK, cap_device
from network_modes import Mode, Speed, cluster, modes
from network_settings import Setting
from paper_tables import GPUS
from torch import Tensor

from mllm_seqpar.comm import Communicator, Recv, Send
from mllm_seqpar.kernels import registry
from mllm_seqpar.planner import Cluster

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference between the results of two strategies, relative to the largest value: they sum in other orders."""
BACKWARD = 2.5
"""Time of an emulated block's backward pass over its forward pass: five matrix products against two."""
Tensors = dict[str, Tensor]


class EmulatedKernel:
    """A block kernel that sleeps for the time of a block and returns zeros, so that ranks may outnumber the cores.

    The executor, the schedules, the merging and the transfers around it are the real ones, and so are the bytes sent.
    `rate` is the FLOP/s of the emulated processor; a block takes 4 FLOP per entry of (rows, keys, dim) in forward.
    """

    name = "emulated"

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.seconds = 0.0  # total of all calls

    def unsupported_reason(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        return "sleeps on the host, which an accelerator would not wait for" if q.device.type != "cpu" else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, ...]:
        return self._zeros([q.shape, q.shape[:3]], 4.0, q, k)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **options: object
    ) -> tuple[Tensor, ...]:
        return self._zeros([q.shape, k.shape, v.shape], 4.0 * BACKWARD, q, k)

    def _zeros(self, shapes: Sequence[torch.Size], flops: float, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Return zeros of these shapes after the time of `flops` per entry."""
        start, seconds = time.perf_counter(), flops * q.numel() * k.shape[2] / self.rate
        results = tuple(q.new_zeros(shape, dtype=torch.float32) for shape in shapes)
        self.seconds += seconds
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return results

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Make `kernel="emulated"` available in this process inside the block."""
        registry._KERNELS[self.name] = lambda: self
        try:
            yield
        finally:
            del registry._KERNELS[self.name]


class Link:
    """The link of this rank's namespace: its own end and the switch's port. Outside namespaces it cannot be capped."""

    def __init__(self) -> None:
        self.capped = LINK in os.environ
        if self.capped:
            self._switch, self._port = os.environ[LINK].split("/")

    def cap(self, mbit: float) -> None:
        """Limit both directions to `mbit` Mbit/s; all ranks call this between transfers."""
        for device in ("eth0", self._port):
            cap_device(device, mbit, None if device == "eth0" else self._switch)


def measure_speed(comm: Communicator, device: torch.device, expected: float) -> Speed:
    """Return the speed of ring hops with all ranks sending at once; the result is the same on all ranks."""
    large = max(1 << 16, int(expected * 0.5))  # half a second at the expected bytes/s
    _hop_s(comm, device, 8, 5)
    latency = median(_hop_s(comm, device, 8, 10) for _ in range(5))
    return large / max(_hop_s(comm, device, large, 4) - latency, 1e-9), latency


def _hop_s(comm: Communicator, device: torch.device, size: int, count: int) -> float:
    """Return the seconds of one of `count` consecutive hops of `size` bytes on the slowest rank."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with slowest_rank(comm, device) as timer:
        for _ in range(count):
            comm.exchange([Send(after, out, "probe")], [Recv(before, into)]).wait()
    return timer.seconds / count


@dataclass
class Times:
    """Seconds of one mode on the slowest rank, one entry per repetition."""

    forward: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


def setting_columns(setting: Setting, block_s: float, mbit: float | None, speed: Speed | None) -> dict[str, Any]:
    """Return the columns that all modes of a setting share: the seconds of a block in forward, the cap, the speed."""
    shape = {name: getattr(setting, name) for name in ("ranks", "rows", "keys", "heads", "kv_heads", "dim", "dtype")}
    common = {"setting": setting.name, "blocks": "emulated" if setting.block_s else "real"}
    common |= shape | {"block_ms": block_s * 1e3, "cap_mbit": mbit or "", "link_mbit": "", "latency_ms": ""}
    if speed is not None:
        common |= {"link_mbit": speed[0] * 8e-6, "latency_ms": speed[1] * 1e3}
    if (paper := setting.paper) is not None:
        common |= {"paper_cluster": {"table3": "A100", "table4": "A30"}[paper.table], "paper_model": paper.label}
        common |= {"paper_gpus": GPUS[paper.table], "paper_rows": paper.rows, "paper_keys": paper.keys}
        common |= {"paper_ring_s": paper.seconds["ring"], "paper_lv_xattn_s": paper.seconds["lv-xattn"]}
    return common


def mode_columns(mode: str, seconds: Sequence[float], sent: int, predicted: float) -> dict[str, Any]:
    """Return the columns of one mode."""
    times = {"seconds": median(seconds), "least_s": min(seconds), "most_s": max(seconds)}
    return {"mode": mode, "repeats": len(seconds), **times, "sent_bytes": sent, "predicted_s": predicted}


class NetworkBenchmark:
    def __init__(self, setting: Setting, comm: Communicator, device: torch.device) -> None:
        self.setting, self.comm, self.device = setting, comm, device
        entries = setting.heads * setting.rows * setting.keys * setting.dim
        self.kernel = EmulatedKernel(4 * entries / setting.block_s) if setting.block_s else None
        self.inputs = _inputs(setting, comm.rank, device)
        self.expected: Tensors | None = None  # results of the first mode, which the others must reproduce
        self.network: Cluster | None = None

    def run(self, repeats: int, seed: int, link: Link, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return a row per mode, of all modes, or `only` these and `none`, after one run of each to warm up."""
        found = {m.name: m for m in modes(self.setting) if only is None or m.spec is None or m.name in only}
        times = {name: Times() for name in found}
        with self.kernel.registered() if self.kernel else contextlib.nullcontext():
            block_s = self.setting.block_s
            if block_s is None:  # a real block's, with all ranks computing at once
                none = modes(self.setting)[0]
                block_s = median(self.once(none)[0] for _ in range(5)) / self.setting.ranks
            mbit, speed = self.shape_link(link, block_s)
            if speed is not None:
                self.network = cluster(self.setting, (block_s, BACKWARD * block_s), speed)
            for name, timed in rounds(found, repeats, seed=seed):
                forward, total = self.once(found[name])
                if timed:
                    times[name].forward.append(forward)
                    times[name].total.append(total)
        common = {"benchmark": "network"} | setting_columns(self.setting, block_s, mbit, speed)
        forward, none = median(times["none"].forward), median(times["none"].total)
        block = forward / self.setting.ranks, (none - forward) / self.setting.ranks
        rows = []
        for name, mode in found.items():
            sent = sum(mode.bytes_sent(self.setting, self.comm.rank).values())
            row = mode_columns(name, times[name].total, sent, mode.predicted_s(self.setting, block, speed))
            tile = "" if mode.spec is None else "{}x{}".format(*mode.spec.mesh_shape)
            row |= {"tile": tile, "overlap": mode.overlap, "forward_s": median(times[name].forward)}
            rows.append(common | row | {"over_none": row["seconds"] / none})
        return rows

    def shape_link(self, link: Link, block_s: float) -> tuple[float | None, Speed | None]:
        """Cap the links for this time of a block, if they can be; return the cap in Mbit/s and the measured speed."""
        mbit = self.setting.cap_mbit(block_s) if link.capped else None
        if mbit is not None:
            self.comm.gather_ints([0])
            link.cap(mbit)
            self.comm.gather_ints([0])
        if self.comm.size == 1:
            return mbit, None
        return mbit, measure_speed(self.comm, self.device, mbit * 125e3 if mbit else 1e8)

    def once(self, mode: Mode) -> tuple[float, float]:
        """Return the slowest rank's seconds of forward, and of both passes; SystemExit on all ranks if any is wrong."""
        inputs = self.inputs[mode.expanded]
        q, k, v = leaves = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")]
        self.comm.gather_ints([0])  # all ranks start together
        self.comm.bytes.reset()
        if self.kernel:
            self.kernel.seconds = 0.0
        synchronize(self.device)
        start = time.perf_counter()
        o = mode.run(q, k, v, self.comm, self.kernel.name if self.kernel else "auto", self.network)
        synchronize(self.device)
        middle = time.perf_counter()
        o.backward(inputs["do"])
        synchronize(self.device)
        end = time.perf_counter()
        results = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *(x.grad for x in leaves)), strict=True))
        problem = self._problem(mode, results)
        all_ranks = self.comm.gather_ints([int((middle - start) * 1e9), int((end - start) * 1e9), problem is not None])
        forward, total, failed = map(max, zip(*all_ranks, strict=True))
        if failed:
            found = problem or "this rank's check passed, another rank's failed"
            raise SystemExit(f"{self.setting.name}, {mode.name}: rank {self.comm.rank}: {found}")
        return forward / 1e9, total / 1e9

    def _problem(self, mode: Mode, results: Tensors) -> str | None:
        """Return how bytes differ from the formulas, or blocks and results from those of other modes, if they do."""
        counted = self.comm.bytes.sent.items()
        sent = {label: size for label, size in counted if size and label not in ("agreement", "gather")}
        expected = mode.bytes_sent(self.setting, self.comm.rank)
        if sent != expected:
            return f"sent {sent}; expected by the formulas: {expected}"
        if self.kernel is not None and self.setting.block_s is not None:
            work = self.setting.ranks * self.setting.block_s * (1 + BACKWARD)
            if abs(self.kernel.seconds / work - 1) >= 1e-6:
                return f"computed {self.kernel.seconds} s of blocks; expected {work} s"
        if self.kernel or mode.spec is None:  # emulated blocks compute zeros, and `none` attends to local keys only
            return None
        if mode.expanded:  # the gradient of a KV head is the sum over its query heads
            for name in ("dk", "dv"):
                results[name] = results[name].unflatten(1, (self.setting.kv_heads, -1)).sum(2)
        if self.expected is None:
            self.expected = results
        limit = CLOSE[results["o"].dtype]
        for name, x in results.items():
            other = self.expected[name].float()
            difference = float((x.float() - other).abs().max() / other.abs().max())
            if not difference <= limit:
                return f"{name} differs by {difference:.1e} from the first mode's; the limit is {limit:.0e}"
        return None


def _inputs(setting: Setting, rank: int, device: torch.device) -> dict[bool, Tensors]:
    """Return random q, k, v and do of this rank, by whether K and V are expanded to all query heads."""
    generator = torch.Generator().manual_seed(rank)
    rows, keys = (setting.heads, setting.rows), (setting.kv_heads, setting.keys)
    plain = {
        name: torch.randn(1, *size, setting.dim, generator=generator).to(device, getattr(torch, setting.dtype))
        for name, size in {"q": rows, "k": keys, "v": keys, "do": rows}.items()
    }
    queries_per_kv = setting.heads // setting.kv_heads
    expanded = {name: plain[name].repeat_interleave(queries_per_kv, dim=1) for name in ("k", "v")}
    return {False: plain, True: plain | expanded}
