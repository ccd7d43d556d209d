"""Timing one setting on the ranks of a group: every mode, in an order that changes, each run checked as it is timed."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from emulated import BACKWARD, NAME, EmulatedKernel, registered
from link import Link, Speed, measured, synchronize
from network_modes import Mode, modes
from network_predict import BlockTime, cluster
from network_settings import Setting
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.planner import Cluster

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far results of two strategies may lie apart, relative to the largest value: they sum in different orders."""
Tensors = dict[str, Tensor]


@dataclass
class Times:
    """Seconds of one mode, of the slowest rank, one entry per repetition; and bytes that this rank sent in each."""

    forward: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    sent: int = 0


@dataclass
class Measured:
    """What one setting gave: times by mode, seconds of a block's forward, the cap, and what the link delivers."""

    times: dict[Mode, Times]
    block_s: float
    mbit: float | None
    speed: Speed | None


class Bench:
    """One setting on this rank."""

    def __init__(self, setting: Setting, comm: Communicator, device: torch.device) -> None:
        self.setting, self.comm, self.device = setting, comm, device
        entries = setting.heads * setting.rows * setting.keys * setting.dim
        self.kernel = EmulatedKernel(4 * entries / setting.block_s) if setting.block_s else None
        self.inputs = {False: _inputs(setting, comm.rank, device)}
        self.inputs[True] = _expanded(self.inputs[False], setting)
        self.expected: Tensors | None = None
        self.where: Cluster | None = None

    def run(self, repeats: int, seed: int, link: Link, only: Sequence[str] | None = None) -> Measured:
        """All modes (`only` these, and `none`), once to warm up and then `repeats` times."""
        found = {m: Times() for m in modes(self.setting) if only is None or m.way is None or m.name in only}
        with registered(self.kernel) if self.kernel else contextlib.nullcontext():
            block_s = self.setting.block_s or self._block()
            mbit = self.setting.cap_mbit(block_s)
            speed = None
            if link.capped and mbit is not None:
                self.comm.gather_ints([0])
                link.cap(mbit)
                self.comm.gather_ints([0])
            if self.comm.size > 1:
                speed = measured(self.comm, self.device, 0.5, mbit * 125e3 if link.capped and mbit else 1e8)
                block = BlockTime(block_s, BACKWARD * block_s)
                self.where = cluster(self.setting, block, speed)
            order, shuffler = list(found), random.Random(seed)
            for repeat in range(1 + repeats):
                for mode in order:
                    forward, total = self.once(mode)
                    if repeat:
                        found[mode].forward.append(forward)
                        found[mode].total.append(total)
                    found[mode].sent = sum(mode.sent(self.setting, self.comm.rank).values())
                shuffler.shuffle(order)
        return Measured(found, block_s, mbit if link.capped else None, speed)

    def once(self, mode: Mode) -> tuple[float, float]:
        """Seconds of forward, and of forward and backward, of the slowest rank.

        Raises:
            SystemExit: on all ranks, when on any of them the run sent other bytes, computed other blocks or found
                another result than it should.
        """
        inputs = self.inputs[mode.expanded]
        q, k, v = (inputs[name].detach().requires_grad_() for name in ("q", "k", "v"))
        sent, name = self.comm.bytes.sent, NAME if self.kernel else "auto"
        self.comm.gather_ints([0])  # together
        self.comm.bytes.reset()
        if self.kernel:
            self.kernel.seconds = 0.0
        synchronize(self.device)
        start = time.perf_counter()
        o = mode.run(q, k, v, self.comm, name, self.where)
        synchronize(self.device)
        middle = time.perf_counter()
        o.backward(inputs["do"])
        synchronize(self.device)
        end = time.perf_counter()
        counted = {label: size for label, size in sent.items() if label not in ("agreement", "gather") and size}
        assert q.grad is not None and k.grad is not None and v.grad is not None
        results = {"o": o.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        problem = self._wrong_bytes(mode, counted) or self._wrong_work() or self._wrong_results(mode, results)
        times = [int(x * 1e9) for x in (middle - start, end - start)]
        everyone = self.comm.gather_ints([*times, int(problem is not None)])
        if any(row[2] for row in everyone):
            raise SystemExit(f"{self.setting.name}, {mode.name}: rank {self.comm.rank}: {problem or 'in order'}")
        return max(row[0] for row in everyone) / 1e9, max(row[1] for row in everyone) / 1e9

    def _wrong_bytes(self, mode: Mode, counted: dict[str, int]) -> str | None:
        formulas = mode.sent(self.setting, self.comm.rank)
        return None if counted == formulas else f"sent {counted}; by the formulas it is {formulas}"

    def _wrong_work(self) -> str | None:
        if self.kernel is None or self.setting.block_s is None:
            return None
        whole = self.setting.ranks * self.setting.block_s * (1 + BACKWARD)
        return (
            None if abs(self.kernel.seconds / whole - 1) < 1e-6 else f"{self.kernel.seconds} s of blocks, not {whole}"
        )

    def _wrong_results(self, mode: Mode, results: Tensors) -> str | None:
        """Real blocks only: emulated ones compute nothing."""
        if self.kernel or mode.way is None:
            return None
        if mode.expanded:  # what all query heads of a key head give it adds up
            for name in ("dk", "dv"):
                results[name] = results[name].unflatten(1, (self.setting.kv_heads, -1)).sum(2)
        if self.expected is None:
            self.expected = results
        close = CLOSE[results["o"].dtype]
        for name, x in results.items():
            other = self.expected[name].float()
            apart = float((x.float() - other).abs().max() / other.abs().max())
            if not apart <= close:
                return f"{name} lies {apart:.1e} from the first mode's, more than {close:.0e}"
        return None

    def _block(self) -> float:
        """Seconds of a real block's forward, all ranks computing at once."""
        none = modes(self.setting)[0]
        return median(self.once(none)[0] for _ in range(5)) / self.setting.ranks


def _inputs(setting: Setting, rank: int, device: torch.device) -> Tensors:
    generator = torch.Generator().manual_seed(rank)
    rows, keys = (setting.heads, setting.rows), (setting.kv_heads, setting.keys)
    sizes = {"q": rows, "k": keys, "v": keys, "do": rows}
    dtype = getattr(torch, setting.dtype)
    return {
        name: torch.randn(1, *size, setting.dim, generator=generator).to(device, dtype) for name, size in sizes.items()
    }


def _expanded(inputs: Tensors, setting: Setting) -> Tensors:
    shared = setting.heads // setting.kv_heads
    return inputs | {name: inputs[name].repeat_interleave(shared, dim=1) for name in ("k", "v")}


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest."""
    return median(times), min(times), max(times)
