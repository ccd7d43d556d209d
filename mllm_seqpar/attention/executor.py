"""The one executor: runs any schedule over one-hop transfers, forward and backward.

It knows nothing of masks, kernels or softmax: pieces are bundles of named tensors, a `Work` computes a block and holds
the results. Per step: post the step's moves as one grouped exchange, compute its blocks while they travel, wait, take
in what arrived. Buffers of pieces that are done with are used again, so a call allocates two of each kind.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator, Recv, Send
from mllm_seqpar.schedules import AttentionBlock, Axis, Schedule, Transfer

Bundle = dict[str, Tensor]


class Work(Protocol):
    """What a schedule is run for: the inputs at home, the computation of a block, and the results."""

    home: Mapping[Axis, Bundle]
    """This rank's own pieces, contiguous."""

    def leaving(self, move: Transfer, piece: Bundle) -> Bundle:
        """What of a piece in hand goes ahead to the rank that `move` goes to; contiguous."""

    def shape(self, move: Transfer, like: Tensor) -> tuple[int, ...]:
        """The shape of a tensor that `move` brings, given the one of the same name that it takes away."""

    def compute(self, block: AttentionBlock, rows: Bundle, columns: Bundle) -> None:
        """Computes one block and adds it to the results for its row and its column."""

    def result(self, axis: Axis, owner: int) -> Bundle:
        """This rank's result so far for that piece, which is about to leave; contiguous. Forgotten afterwards."""

    def arrived(self, move: Transfer, bundle: Bundle) -> None:
        """Adds what other ranks computed for the piece of `move.recv_shard`, and `move` brought, to this rank's own."""


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
        incoming: list[tuple[Transfer, Bundle]] = []
        for move in step.transfers:
            if move.kind == "input":
                leaving = work.leaving(move, held[move.axis, move.send_shard])
            else:
                leaving = work.result(move.axis, move.send_shard)
            buffers = pool.take({n: work.shape(move, t) for n, t in leaving.items()}, leaving)
            sends += [Send(move.dst, tensor, name) for name, tensor in leaving.items() if tensor.numel()]
            recvs += [Recv(move.src, buffer) for buffer in buffers.values() if buffer.numel()]
            incoming.append((move, buffers))
        pending = comm.exchange(sends, recvs)
        if not overlap:
            pending.wait()
        for block in step.blocks:
            work.compute(block, held["q", block.q_shard], held["kv", block.kv_shard])
        if overlap:
            pending.wait()
        for move, buffers in incoming:
            if move.kind == "input":
                held[move.axis, move.recv_shard] = buffers
            else:
                work.arrived(move, buffers)
                pool.give(buffers)
        for key in [key for key, last in last_use.items() if last == index and key[1] != comm.rank]:
            pool.give(held.pop(key))


def _last_uses(schedule: Schedule) -> dict[tuple[Axis, int], int]:
    """The index of the last step that computes with, or passes on, each piece."""
    last: dict[tuple[Axis, int], int] = {}
    for index, step in enumerate(schedule):
        for block in step.blocks:
            last["q", block.q_shard] = last["kv", block.kv_shard] = index
        for move in step.transfers:
            if move.kind == "input":
                last[move.axis, move.send_shard] = index
    return last


class _Pool:
    """Receive buffers by kind, that is by everything but length; a ring that allocates anew each hop pays page faults.

    A piece takes the shortest free buffer that is long enough, and uses the front of it. Where all are too short the
    longest makes way for a longer one, so there are never more of a kind than are in use at one time.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, list[Tensor]] = defaultdict(list)  # flat, shortest first
        self._lent: dict[int, tuple[Hashable, Tensor]] = {}

    def take(self, shapes: Mapping[str, tuple[int, ...]], like: Mapping[str, Tensor]) -> Bundle:
        bundle = {}
        for name, shape in shapes.items():
            dtype, device = like[name].dtype, like[name].device
            kind, size = (shape[:2], shape[3:], dtype, device), math.prod(shape)
            free = self._free[kind]
            fits = [i for i, flat in enumerate(free) if flat.numel() >= size]
            if free and not fits:
                free.pop()
            flat = free.pop(fits[0]) if fits else torch.empty(size, dtype=dtype, device=device)
            bundle[name] = flat[:size].view(shape)
            if size:
                self._lent[flat.data_ptr()] = kind, flat
        return bundle

    def give(self, bundle: Bundle) -> None:
        for tensor in bundle.values():
            if tensor.numel():
                kind, flat = self._lent.pop(tensor.data_ptr())
                self._free[kind].append(flat)
                self._free[kind].sort(key=Tensor.numel)
