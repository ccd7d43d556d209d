"""Ranks as threads over a model of NCCL: order of operations, time of transfers, and deadlocks.

    results = run_nccl_model(n, fn, *args, timing="late", seed=0)      # fn(comm, *args) on every rank

The thread of a rank stands for its host and its compute stream, which see everything in the same order. One thread runs
at a time, and a scheduler that is seeded decides which, so a run is the same every time. Ranks must not wait for each
other by other means than communicators. The model has these rules:

- A communicator has one queue of operations per rank, in the order in which they are posted. An operation is one
  exchange, with all its sends and receives, or one collective. Only the operation at the head of a queue runs, and it
  remains there until it is complete. With `one_resource`, all communicators of a rank share one queue, as on a device
  on which kernels of two communicators cannot run at the same time; the order of posts must then be the same on all
  ranks, whatever the communicator.
- A message moves when the send and the receive are both at the head of their queues. Messages between two ranks match
  in order. A collective moves when it is at the head of the queues of all ranks.
- A message moves at any time between the post and the wait. `timing` decides: "late", when no rank can go on without
  it; "early", as soon as both ends are posted; "random", between any two torch operations. The memory that is sent is
  read when the message moves. Receive buffers are spoiled (NaN, or numbers that make no sense) when they are posted.

Violations raise on all ranks: `Deadlock` if no rank can go on, or an operation is never completed or waited for;
`Mismatch` if both ends disagree on shape, dtype or label; `DataRace` if memory of an operation changes, or is used by
another operation, before it is waited for. The model is stricter than NCCL in two places: NCCL buffers small messages,
so that a send may complete without its receive, and does not compare labels. Other streams than these, and host code
that waits for the device, are not modelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_seqpar.comm import Communicator, Pending, Recv, Send, TransferCounter
from mllm_seqpar.comm.base import GroupState
from nccl_queues import DataRace, Deadlock, End, Group, Mismatch, NcclQueues, Operation, Timing

__all__ = ["DataRace", "Deadlock", "Mismatch", "NcclCommunicator", "ShardedParameters", "run_nccl_model"]

T = TypeVar("T")


class _PendingOperation(Pending):
    def __init__(self, model: NcclQueues, ops: Sequence[Operation]) -> None:
        self._model, self._ops = model, list(ops)

    def wait(self) -> None:
        while self._ops:
            self._model.wait(self._ops.pop(0))


class PendingCollective(_PendingOperation):
    """A posted collective; `wait` returns its result, which must not be used before."""

    def __init__(self, model: NcclQueues, op: Operation, result: Callable[[], Any]) -> None:
        super().__init__(model, [op])
        self._result = result

    def wait(self) -> Any:
        super().wait()
        return self._result()


class NcclCommunicator(Communicator):
    """Rank `rank` of the group `group` of a model; collectives are single operations, as in NCCL."""

    def __init__(self, model: NcclQueues, group: Group, world_rank: int) -> None:
        self.model, self.queue, self._world_rank = model, group, world_rank
        self.rank, self.size, self.bytes = group.members.index(world_rank), len(group.members), TransferCounter()
        self.kept = GroupState()

    def another(self, name: str, members: Sequence[int] | None = None) -> NcclCommunicator:
        """Return this rank's communicator `name` with its own queues, over the given ranks of the model or all."""
        group = Group(name, tuple(range(self.model.size) if members is None else members))
        return NcclCommunicator(self.model, group, self._world_rank)

    @property
    def identity(self) -> Hashable:
        return self.model, self.queue, self._world_rank

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        for s in sends:
            self.bytes.add(s.label, s.tensor.numel() * s.tensor.element_size())
        ops = [
            self._post("exchange", [tuple(s) for s in group_sends], [(*r, "") for r in group_recvs])
            for group_sends, group_recvs in self.rounds(sends, recvs)
            if group_sends or group_recvs
        ]
        return _PendingOperation(self.model, ops)

    def rounds(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Sequence[tuple[Sequence[Send], Sequence[Recv]]]:
        """Return the groups in which an exchange is posted, one after the other; override it to split an exchange."""
        return [(sends, recvs)]

    def all_gather(self, x: Tensor, label: str = "gather") -> list[Tensor]:
        return self.start_all_gather(x, label).wait()

    def start_all_gather(self, x: Tensor, label: str = "gather") -> PendingCollective:
        x = x.detach().contiguous()
        self.bytes.add(label, (self.size - 1) * x.numel() * x.element_size())
        return self._collective("all_gather", label, [x] * self.size, lambda out: out)

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "reduce_scatter") -> Tensor:
        return self.start_reduce_scatter(parts, label).wait()

    def start_reduce_scatter(self, parts: Sequence[Tensor], label: str = "reduce_scatter") -> PendingCollective:
        parts = [part.detach().contiguous() for part in parts]
        self.bytes.add(label, (self.size - 1) * parts[0].numel() * parts[0].element_size())
        return self._collective("reduce_scatter", label, parts, lambda out: torch.stack(out).sum(0))

    def all_reduce(self, x: Tensor, label: str = "reduce") -> Tensor:
        x = x.detach().contiguous()
        self.bytes.add(label, 2 * (self.size - 1) * x.numel() * x.element_size() // self.size)
        return self._collective("all_reduce", label, [x] * self.size, lambda out: torch.stack(out).sum(0)).wait()

    def _collective(
        self, kind: str, label: str, sends: Sequence[Tensor], result: Callable[[list[Tensor]], Any]
    ) -> PendingCollective:
        """Post a collective that sends sends[r] to rank r; `result` makes the result from what each rank sent."""
        received = [torch.empty_like(sends[self.rank]) for _ in sends]
        op = self._post(
            kind, [(i, x, label) for i, x in enumerate(sends)], [(i, x, label) for i, x in enumerate(received)]
        )
        return PendingCollective(self.model, op, lambda: result(received))

    def _post(self, kind: str, sends: Sequence[tuple[Any, ...]], recvs: Sequence[tuple[Any, ...]]) -> Operation:
        members = self.queue.members
        ends = [[End(members[peer], x, label) for peer, x, label in of] for of in (sends, recvs)]
        op = Operation(self.queue, self._world_rank, kind, *ends)
        self.model.post(op)
        return op


@dataclass
class ShardedParameters:
    """Parameters that FSDP2 would shard: each rank holds 1/n of every weight, by rows.

    Backward gathers the weight of the previous layer while a layer computes, then sums the gradients of the layer.
    Forward gathers the weight of the next layer while a layer computes, or without `prefetch` when it is needed.
    """

    comm: NcclCommunicator
    shards: list[Tensor]
    prefetch: bool = True
    grads: dict[int, Tensor] = field(default_factory=dict)
    _gathers: dict[int, PendingCollective] = field(default_factory=dict)
    _reduction: tuple[int, PendingCollective] | None = None

    def gather(self, layer: int) -> None:
        self._gathers[layer] = self.comm.start_all_gather(self.shards[layer], f"weight {layer}")

    def weight(self, layer: int, following: int) -> Tensor:
        """Return the whole weight of a layer, and gather that of the layer that follows, if there is one."""
        if layer not in self._gathers:
            self.gather(layer)
        whole = torch.cat(self._gathers.pop(layer).wait())
        if (self.prefetch or following < layer) and 0 <= following < len(self.shards):
            self.gather(following)
        return whole

    def reduce(self, layer: int, grad: Tensor) -> None:
        self.finish()
        parts = list(grad.chunk(self.comm.size))
        self._reduction = layer, self.comm.start_reduce_scatter(parts, f"gradient {layer}")

    def finish(self) -> None:
        if self._reduction is not None:
            layer, pending = self._reduction
            self.grads[layer] = pending.wait()
            self._reduction = None


class _BetweenOperations(TorchDispatchMode):
    """Calls the model between the torch operations of a rank."""

    def __init__(self, model: NcclQueues) -> None:
        super().__init__()
        self._model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._model.moment()
        return func(*args, **(kwargs or {}))


def run_nccl_model(
    size: int,
    fn: Callable[..., T],
    *args: Any,
    timing: Timing = "late",
    seed: int = 0,
    one_resource: bool = False,
    communicator: type[NcclCommunicator] = NcclCommunicator,
) -> list[T]:
    """Run ``fn(communicator, *args)`` on `size` ranks, one thread each, and return their results by rank.

    The first error of a rank, or violation of a rule, is raised here, and stops all ranks.
    """
    model = NcclQueues(size, timing, seed, one_resource)
    group = Group("attention", tuple(range(size)))
    results: dict[int, T] = {}

    def body(rank: int) -> None:
        error: BaseException | None = None
        try:
            model.start(rank)
            between = _BetweenOperations(model) if timing == "random" else nullcontext()
            with torch.autograd.set_multithreading_enabled(False), between:
                results[rank] = fn(communicator(model, group, rank), *args)
        except BaseException as raised:  # noqa: BLE001 - raised in the caller's thread below
            error = raised
        model.end(rank, error)

    threads = [threading.Thread(target=body, args=(rank,), name=f"nccl-model-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if model.failure is not None:
        raise model.failure
    return [results[rank] for rank in range(size)]
