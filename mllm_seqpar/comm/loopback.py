"""All ranks in one process, one thread each: the transport for one GPU, for notebooks and for debugging.

A sent tensor is copied when posted (that copy stands for the wire), so the sender may reuse its buffer after `wait`
just as with a real transport. Autograd must run in the thread that called it, else the ranks' backward passes would
share the device's one autograd thread and wait for each other for ever: `run_loopback` sees to that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mllm_seqpar.errors import TransferError

from .base import Pending, Recv, Send, check_contiguous
from .byte_counter import ByteCounter
from .exchange_collectives import ExchangeCollectives

T = TypeVar("T")


class LoopbackWorld:
    """The mailboxes that the ranks of one loopback group share."""

    def __init__(self, size: int, timeout: float = 120.0) -> None:
        self.size, self.timeout = size, timeout
        self.failed = threading.Event()
        self._boxes: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (i, j): queue.Queue() for i in range(size) for j in range(size)
        }

    def put(self, source: int, target: int, tensor: Tensor) -> None:
        """Leaves a copy of `tensor` in the mailbox from `source` to `target`."""
        self._boxes[source, target].put(tensor.detach().clone())

    def get(self, source: int, target: int) -> Tensor:
        """The oldest tensor from `source` to `target`; TransferError when another rank failed or the time is up."""
        waited = 0.0
        while waited < self.timeout:
            if self.failed.is_set():
                raise TransferError(
                    f"loopback rank {target}: another rank failed; its error is reported beside this one"
                )
            try:
                return self._boxes[source, target].get(timeout=0.05)
            except queue.Empty:
                waited += 0.05
        raise TransferError(f"loopback rank {target}: nothing arrived from rank {source} within {self.timeout:g} s")


class _PendingCopies(Pending):
    def __init__(self, world: LoopbackWorld, rank: int, recvs: Sequence[Recv]) -> None:
        self._world, self._rank, self._recvs = world, rank, list(recvs)
        self._waited = False

    def wait(self) -> None:
        if self._waited:
            raise RuntimeError("Pending.wait: this exchange was waited for already")
        self._waited = True
        for peer, buffer in self._recvs:
            arrived = self._world.get(peer, self._rank)
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
        self.bytes = ByteCounter()

    @property
    def identity(self) -> Hashable:
        """The world and the rank; all groups of one are alike."""
        return (self.world, self.rank) if self.size > 1 else None

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        """See `Communicator.exchange`."""
        check_contiguous(sends, recvs)
        for peer, tensor, label in sends:
            self.bytes.add(label, tensor.numel() * tensor.element_size())
            self.world.put(self.rank, peer, tensor)
        return _PendingCopies(self.world, self.rank, recvs)


def run_loopback(size: int, fn: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """Runs ``fn(communicator, *args)`` for `size` ranks, one thread each, and returns their results by rank.

    Raises the first error that a rank raised; the other ranks are stopped at their next exchange. Gradient and
    inference modes are per thread in torch: `fn` sets those it wants.
    """
    world = LoopbackWorld(size, timeout)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(LoopbackCommunicator(world, rank), *args)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread below
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
