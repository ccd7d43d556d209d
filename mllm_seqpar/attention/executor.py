"""The one executor: runs any schedule over one-hop transfers, forward and backward.

It knows nothing of masks, kernels or softmax: pieces are bundles of named tensors, a `Work` computes a block and holds
the results. Per step: post the step's moves as one grouped exchange, compute its blocks while they travel, wait, take
in what arrived. Buffers of pieces that are done with are used again, so a call allocates two of each kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..comm import Communicator, Recv, Send
from .schedule import Axis, Block, Schedule

Bundle = dict[str, Tensor]


class Work(Protocol):
    """What a schedule is run for: the inputs at home, the computation of a block, and the results."""

    home: Mapping[Axis, Bundle]
    """This rank's own pieces, contiguous."""

    def shape(self, axis: Axis, owner: int, like: Tensor) -> tuple[int, ...]:
        """The shape that a tensor of rank `owner`'s piece of `axis` has, given another rank's tensor of that name."""

    def compute(self, block: Block, rows: Bundle, columns: Bundle) -> None:
        """Computes one block and adds it to the results for its row and its column."""

    def result(self, axis: Axis, owner: int) -> Bundle:
        """This rank's result so far for that piece, which is about to leave; contiguous. Forgotten afterwards."""

    def arrived(self, axis: Axis, owner: int, bundle: Bundle) -> None:
        """Adds what the ranks before computed for that piece to this rank's own result for it."""


def run_schedule(schedule: Schedule, comm: Communicator, work: Work, *, overlap: bool = True) -> None:
    """Runs `schedule` for this rank; the results are in `work` afterwards.

    Args:
        schedule: this rank's steps; the other ranks run theirs.
        comm: the transport.
        work: inputs, computation, results.
        overlap: False waits for each step's transfers before computing its blocks; only to measure.
    """
    held: dict[tuple[Axis, int], Bundle] = {(axis, comm.rank): bundle for axis, bundle in work.home.items()}
    last_use = _last_uses(schedule)
    pool = _Pool()
    for index, step in enumerate(schedule):
        sends: list[Send] = []
        recvs: list[Recv] = []
        incoming: list[tuple[str, Axis, int, Bundle]] = []
        for move in step.moves:
            if move.stream == "ahead":
                leaving = held[move.axis, move.send]
            else:
                leaving = work.result(move.axis, move.send)
            buffers = pool.take({n: work.shape(move.axis, move.recv, t) for n, t in leaving.items()}, leaving)
            sends += [Send(move.to, tensor, name) for name, tensor in leaving.items() if tensor.numel()]
            recvs += [Recv(move.source, buffer) for buffer in buffers.values() if buffer.numel()]
            incoming.append((move.stream, move.axis, move.recv, buffers))
        pending = comm.exchange(sends, recvs)
        if not overlap:
            pending.wait()
        for block in step.blocks:
            work.compute(block, held["rows", block.row], held["columns", block.column])
        if overlap:
            pending.wait()
        for stream, axis, owner, buffers in incoming:
            if stream == "ahead":
                held[axis, owner] = buffers
            else:
                work.arrived(axis, owner, buffers)
                pool.give(buffers)
        for key in [key for key, last in last_use.items() if last == index and key[1] != comm.rank]:
            pool.give(held.pop(key))


def _last_uses(schedule: Schedule) -> dict[tuple[Axis, int], int]:
    """The index of the last step that computes with, or passes on, each piece."""
    last: dict[tuple[Axis, int], int] = {}
    for index, step in enumerate(schedule):
        for block in step.blocks:
            last["rows", block.row] = last["columns", block.column] = index
        for move in step.moves:
            if move.stream == "ahead":
                last[move.axis, move.send] = index
    return last


class _Pool:
    """Receive buffers by shape, dtype and device; a ring that allocates anew each hop pays for page faults."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[tuple[int, ...], torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    def take(self, shapes: Mapping[str, tuple[int, ...]], like: Mapping[str, Tensor]) -> Bundle:
        bundle = {}
        for name, shape in shapes.items():
            free = self._free[shape, like[name].dtype, like[name].device]
            bundle[name] = free.pop() if free else torch.empty(shape, dtype=like[name].dtype, device=like[name].device)
        return bundle

    def give(self, bundle: Bundle) -> None:
        for tensor in bundle.values():
            self._free[tuple(tensor.shape), tensor.dtype, tensor.device].append(tensor)
