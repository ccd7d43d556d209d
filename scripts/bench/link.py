"""This rank's link: setting its speed, and measuring what it delivers."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from statistics import median

import torch
from namespaces import LINK

from mllm_seqpar.comm import Communicator, Recv, Send

BURST = 128 << 10
"""Bytes that may pass at once above the rate. With less, a cap that wakes late loses tokens and delivers far less than
its rate; with this much, messages below it hardly feel the cap by themselves, only their sum does."""
QUEUE_S = 0.2


class Link:
    """The two ends of a rank's cable: its own, and the switch's port."""

    def __init__(self) -> None:
        self.capped = LINK in os.environ
        if self.capped:
            self._switch, self._port = os.environ[LINK].split("/")

    def cap(self, mbit: float) -> None:
        """Lets so many Mbit/s through in each direction; to be called by all ranks between transfers.

        Outside of namespaces there is nothing to cap, and nothing happens.
        """
        if not self.capped:
            return
        for where in (["dev", "eth0"], ["dev", self._port]):
            within = [] if where[1] == "eth0" else ["-n", self._switch]
            shape = ["tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", f"{BURST}", "latency", f"{QUEUE_S * 1e3:g}ms"]
            subprocess.run(["tc", *within, "qdisc", "replace", *where, "root", *shape], check=True)


@dataclass(frozen=True)
class Speed:
    """What a link delivers: bytes/s and direction, and seconds of a message too small to take any."""

    bytes_per_s: float
    latency_s: float


def measured(comm: Communicator, device: torch.device, seconds: float, about: float) -> Speed:
    """What a ring of one-hop transfers gets, all ranks sending at once, as the strategies do; the same on all ranks.

    Args:
        comm: the group, of two or more.
        device: where messages lie.
        seconds: how long one large message may take.
        about: what is expected, bytes/s.
    """
    large = max(1 << 16, int(about * seconds))
    _hops(comm, device, 8, 5)
    latency = median(_hops(comm, device, 8, 10) for _ in range(5))
    return Speed(large / max(_hops(comm, device, large, 4) - latency, 1e-9), latency)


def _hops(comm: Communicator, device: torch.device, size: int, count: int) -> float:
    """Seconds of one of `count` hops of `size` bytes, one after the other, of the slowest rank."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.gather_ints([0])
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        comm.exchange([Send(after, out, "probe")], [Recv(before, into)]).wait()
    synchronize(device)
    took = (time.perf_counter() - start) / count
    return max(row[0] for row in comm.gather_ints([int(took * 1e9)])) / 1e9


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
