"""The transport that runs all ranks as threads of one process: for one GPU, for notebooks and for debugging.

A tensor is copied when it is sent, so the sender may reuse its buffer after `wait`, as with other transports.
`run_loopback` makes autograd run in the thread that calls it. Otherwise the backward passes of all ranks would share
the one autograd thread of the device and deadlock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mllm_seqpar.errors import TransferError

from .base import ExchangeCollectives, GroupState, Pending, Recv, Send, TransferCounter

T = TypeVar("T")


class LoopbackWorld:
    """The message queues that the ranks of one loopback group share."""

    def __init__(self, size: int, timeout: float = 120.0) -> None:
        self.size, self.timeout = size, timeout
        self.failed = threading.Event()
        pairs = [(source, target) for source in range(size) for target in range(size)]
        self._queues: dict[tuple[int, int], queue.Queue[Tensor]] = {pair: queue.Queue() for pair in pairs}

    def put(self, source: int, target: int, tensor: Tensor) -> None:
        """Append a copy of `tensor` to the queue from `source` to `target`."""
        self._queues[source, target].put(tensor.detach().clone())

    def get(self, source: int, target: int) -> Tensor:
        """Return the oldest tensor from `source` to `target`.

        Raises:
            TransferError: another rank failed, or nothing arrived within the time limit.
        """
        waited = 0.0
        while waited < self.timeout:
            if self.failed.is_set():
                raise TransferError(f"loopback rank {target}: another rank failed, see its own error")
            try:
                return self._queues[source, target].get(timeout=0.05)
            except queue.Empty:
                waited += 0.05
        raise TransferError(f"loopback rank {target}: nothing arrived from rank {source} within {self.timeout:g} s")


class _PendingCopies(Pending):
    def __init__(self, world: LoopbackWorld, rank: int, recvs: Sequence[Recv], counter: TransferCounter) -> None:
        self._world, self._rank, self._recvs, self._bytes = world, rank, list(recvs), counter

    def wait(self) -> None:
        start = time.perf_counter()
        arrived_from = [(peer, buffer, self._world.get(peer, self._rank)) for peer, buffer in self._recvs]
        self._recvs.clear()
        self._bytes.waited += time.perf_counter() - start
        for peer, buffer, arrived in arrived_from:
            if arrived.shape != buffer.shape or arrived.dtype != buffer.dtype:
                raise TransferError(
                    f"loopback rank {self._rank}: rank {peer} sent {tuple(arrived.shape)} {arrived.dtype} where "
                    f"{tuple(buffer.shape)} {buffer.dtype} was expected; the ranks disagree on shapes"
                )
            buffer.copy_(arrived)


class LoopbackCommunicator(ExchangeCollectives):
    """Rank `rank` of a `LoopbackWorld`."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.bytes, self.kept = TransferCounter(), GroupState()

    @property
    def identity(self) -> Hashable:
        # All groups of one rank are equal.
        return (self.world, self.rank) if self.size > 1 else None

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        for peer, tensor, label in sends:
            self.bytes.sent[label] += tensor.nbytes
            self.bytes.messages[label] += 1
            self.world.put(self.rank, peer, tensor)
        return _PendingCopies(self.world, self.rank, recvs, self.bytes)


def run_loopback(size: int, fn: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """Run ``fn(communicator, *args)`` on `size` ranks, one thread each, and return their results by rank.

    If a rank raises, the other ranks stop at their next exchange, and its error is raised here. Gradient and inference
    modes are per thread in torch, so `fn` has to set them.
    """
    world = LoopbackWorld(size, timeout)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(LoopbackCommunicator(world, rank), *args)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread below
            errors[rank] = error
            world.failed.set()

    threads = [threading.Thread(target=body, args=(rank,), name=f"loopback-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = next((e for e in errors.values() if not isinstance(e, TransferError)), next(iter(errors.values())))
        raise first
    return [results[rank] for rank in range(size)]
