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

import ctypes
import itertools
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_seqpar.comm import Communicator, Pending, Recv, Send, TransferCounter
from mllm_seqpar.comm.base import GroupState
from mllm_seqpar.errors import TransferError

T = TypeVar("T")
Timing = Literal["late", "early", "random"]


class Deadlock(AssertionError):
    """No rank can go on, or an operation was never completed or waited for."""


class Mismatch(AssertionError):
    """The two ends of a message, or the ranks of a collective, disagree."""


class DataRace(AssertionError):
    """Memory of an operation was changed or used again before the operation was waited for."""


@dataclass(eq=False)
class End:
    """One end of a message: the peer, and the memory that is read or written.

    `expected` is what the memory must contain until the message moves, and after it.
    """

    peer: int
    tensor: Tensor
    label: str
    expected: bytes = b""
    moved: bool = False

    def __post_init__(self) -> None:
        self.start, self.size = self.tensor.data_ptr(), self.tensor.numel() * self.tensor.element_size()

    @property
    def content(self) -> bytes:
        return ctypes.string_at(self.start, self.size) if self.size else b""

    def write(self, data: bytes) -> None:
        if self.size:  # raw memory, as a device writes it: no autograd version, no inference mode
            ctypes.memmove(self.start, data, self.size)
        self.expected = data

    def spoil(self) -> None:
        kind = self.tensor.dtype
        byte = 0xFF if kind.is_floating_point or kind.is_complex else 0x01 if kind is torch.bool else 0xA5
        self.write(bytes([byte]) * self.size)

    def overlaps(self, other: End) -> bool:
        return self.start < other.start + other.size and other.start < self.start + self.size

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return " ".join(filter(None, (self.label, str(tuple(self.tensor.shape)), dtype)))


@dataclass(eq=False)
class Operation:
    """An exchange or a collective on one rank. Its messages are (peer, memory); peers are ranks of the model."""

    comm: Group
    rank: int
    kind: str
    sends: list[End]
    recvs: list[End]
    number: int = -1
    waited: bool = False

    def __post_init__(self) -> None:
        self.left = len(self.sends) + len(self.recvs)  # ends that have not moved

    @property
    def done(self) -> bool:
        return not self.left

    @property
    def ends(self) -> Iterator[End]:
        return itertools.chain(self.sends, self.recvs)

    def __str__(self) -> str:
        name = f"{self.kind} {self.number} of communicator {self.comm.name!r}"
        if self.kind != "exchange":
            return f"{name} ({self.sends[0]})"
        parts = [f"sends {end} to rank {end.peer}" for end in self.sends if not end.moved]
        parts += [f"receives {end} from rank {end.peer}" for end in self.recvs if not end.moved]
        return f"{name} ({', '.join(parts) or 'complete'})"


class Group(NamedTuple):
    """A communicator: its name, and its members as ranks of the model."""

    name: str
    members: tuple[int, ...]


@dataclass(eq=False)
class NcclQueues:
    """The queues of all ranks, and the scheduler of their threads."""

    size: int
    timing: Timing = "late"
    seed: int = 0
    one_resource: bool = False
    failure: BaseException | None = None
    _queues: dict[Hashable, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    _unwaited: dict[int, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    _waiting: dict[int, Operation] = field(default_factory=dict)
    _posts: Counter[Hashable] = field(default_factory=Counter)
    _ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.RLock()
        self._turns = [threading.Condition(self._lock) for _ in range(self.size)]
        self._current = self._random.randrange(self.size)

    # What the threads of the ranks call.

    def start(self, rank: int) -> None:
        """Block until it is the turn of `rank`."""
        with self._lock:
            self._await_turn(rank)

    def end(self, rank: int, error: BaseException | None) -> None:
        """Take `rank`, which returned or raised, out of the schedule."""
        with self._lock:
            self._ended.add(rank)
            self._guarded(error)

    def post(self, op: Operation) -> None:
        """Append an operation to the queue of its rank; other ranks may run before this returns."""
        with self._lock:
            self._require_no_failure()
            op.number = self._posts[op.comm, op.rank]
            self._reject_shared_memory(op)
            self._posts.update([(op.comm, op.rank), op.rank])
            for end in op.sends:
                end.expected = end.content
            for end in op.recvs:
                end.spoil()
            self._queue(op.comm, op.rank).append(op)
            self._unwaited[op.rank].append(op)
            if self.timing != "late":
                self._guarded(yielding=True)
                self._await_turn(op.rank)

    def wait(self, op: Operation) -> None:
        """Block until an operation is complete, and check that its memory did not change meanwhile."""
        with self._lock:
            self._require_no_failure()
            op.waited = True
            if not op.done:
                self._waiting[op.rank] = op
                self._guarded()
                self._await_turn(op.rank)
            self._unwaited[op.rank].remove(op)
            for end in op.ends:
                self._require_unchanged(op, end)

    def moment(self) -> None:
        """Check memory in use, and at times move a message; called between two operations of the rank that runs."""
        with self._lock:
            self._require_no_failure()
            for op in self._unwaited[self._current]:
                for end in op.ends:
                    self._require_unchanged(op, end)
            if self._random.random() < 0.2 and (movable := self._movable()):
                self._random.choice(movable)()

    # The scheduler.

    def _await_turn(self, rank: int) -> None:
        while self._current != rank and self.failure is None:
            self._turns[rank].wait()
        self._require_no_failure()

    def _require_no_failure(self) -> None:
        if self.failure is not None:
            raise TransferError("another rank of the NCCL model failed, see its own error") from self.failure

    def _guarded(self, error: BaseException | None = None, yielding: bool = False) -> None:
        """Choose the next rank; an error, given or found, ends the run on all ranks."""
        if self.failure is None:
            try:
                if error is not None:
                    raise error
                self._choose(yielding)
            except BaseException as found:  # noqa: BLE001 - raised by `run_nccl_model`
                self.failure = found
        for rank in range(self.size) if self.failure is not None else [self._current]:
            self._turns[rank].notify()

    def _choose(self, yielding: bool) -> None:
        """Move messages as `timing` says, and choose the rank that runs next."""
        movable = [] if self.timing == "late" else self._movable()
        while movable and (self.timing == "early" or (self.timing == "random" and self._random.random() < 0.5)):
            self._random.choice(movable)()
            movable = self._movable()
        while not (ready := self._ready()):
            if len(self._ended) == self.size:
                return self._require_complete()
            movable = self._movable(only_awaited=True) or self._movable()
            if not movable:
                raise Deadlock(self._report())
            self._random.choice(movable)()
        if self.timing == "early" and yielding:  # all ranks post before any of them computes
            fewest = min(self._posts[rank] for rank in ready)
            ready = [rank for rank in ready if self._posts[rank] == fewest]
        self._current = self._random.choice(ready)
        self._waiting.pop(self._current, None)

    def _ready(self) -> list[int]:
        blocked = {rank for rank, op in self._waiting.items() if not op.done}
        return [rank for rank in range(self.size) if rank not in self._ended | blocked]

    # The queues.

    def _queue(self, comm: Group, rank: int) -> deque[Operation]:
        return self._queues[rank if self.one_resource else (comm, rank)]

    def _head(self, comm: Group, rank: int) -> Operation | None:
        """Return the operation at the head of the queue of `rank` if it is one of `comm`; none there is done."""
        queue = self._queue(comm, rank)
        return queue[0] if queue and queue[0].comm == comm else None

    def _movable(self, only_awaited: bool = False) -> list[Callable[[], None]]:
        """Return a function for each message, and each collective, that can move now."""
        found: list[Callable[[], None]] = []
        for queue in self._queues.values():
            while queue and queue[0].done:
                queue.popleft()
        for comm in dict.fromkeys(queue[0].comm for queue in list(self._queues.values()) if queue):
            heads = {rank: self._head(comm, rank) for rank in comm.members}
            awaited = {rank for rank, op in heads.items() if op is not None and self._waiting.get(rank) is op}
            present = [op for op in heads.values() if op is not None]
            if len(present) == len(heads) and {op.kind for op in present} == {present[0].kind} != {"exchange"}:
                if awaited or not only_awaited:
                    found.append(lambda present=present: self._run_collective(present))
                continue
            for src in present:
                for peer in dict.fromkeys(end.peer for end in src.sends if not end.moved):
                    if only_awaited and not {src.rank, peer} & awaited:
                        continue
                    dst = heads.get(peer)
                    pair = self._next_message(src, dst)
                    if pair is not None:
                        found.append(lambda pair=pair, ops=(src, dst): self._move(*ops, *pair))
        return found

    @staticmethod
    def _next_message(src: Operation, dst: Operation | None) -> tuple[End, End] | None:
        """Return both ends of the next message from the operation `src` to the operation `dst`."""
        if dst is None or not src.kind == dst.kind == "exchange":
            return None
        send = next((end for end in src.sends if end.peer == dst.rank and not end.moved), None)
        recv = next((end for end in dst.recvs if end.peer == src.rank and not end.moved), None)
        return None if send is None or recv is None else (send, recv)

    def _run_collective(self, ops: list[Operation]) -> None:
        if len({str(op.sends[0]) for op in ops}) > 1:
            raise Mismatch("the ranks disagree: " + "; ".join(f"rank {op.rank}: {op}" for op in ops))
        for src, dst in itertools.product(ops, repeat=2):
            send = next(end for end in src.sends if end.peer == dst.rank)
            recv = next(end for end in dst.recvs if end.peer == src.rank)
            self._move(src, dst, send, recv)

    def _move(self, src: Operation, dst: Operation, send: End, recv: End) -> None:
        if send.tensor.shape != recv.tensor.shape or send.tensor.dtype != recv.tensor.dtype:
            raise Mismatch(f"rank {src.rank} sends {send} where rank {dst.rank} receives {recv}: {src}; {dst}")
        self._require_unchanged(src, send)
        self._require_unchanged(dst, recv)
        recv.write(send.content)  # of now, not of the post
        send.moved = recv.moved = True
        src.left -= 1
        dst.left -= 1

    # What is reported.

    def _reject_shared_memory(self, op: Operation) -> None:
        """Raise if a receive buffer of `op` is in use, or what it sends is a receive buffer in use."""
        in_use = [(end, other, end in other.recvs) for other in [*self._unwaited[op.rank], op] for end in other.ends]
        for end, received in [(end, False) for end in op.sends] + [(end, True) for end in op.recvs]:
            for other, owner, other_received in in_use:
                if other is not end and (received or other_received) and end.size and end.overlaps(other):
                    raise DataRace(
                        f"rank {op.rank}: {'the receive buffer' if received else 'what is sent'} {end} of {op} shares "
                        f"memory with {other} of {owner}, which was not waited for"
                    )

    @staticmethod
    def _require_unchanged(op: Operation, end: End) -> None:
        if end.content != end.expected:
            what = "receive buffer for" if end in op.recvs else "tensor sent as"
            raise DataRace(f"rank {op.rank}: the {what} {end} changed before it was waited for: {op}")

    def _require_complete(self) -> None:
        while movable := self._movable():
            movable[0]()
        left = [op for queue in self._queues.values() for op in queue if not op.done]
        if left:
            raise Deadlock("; ".join(f"rank {op.rank} returned, but nothing completes its {op}" for op in left))
        for rank, ops in sorted(self._unwaited.items()):
            for op in ops:
                raise Deadlock(f"rank {rank} never waited for {op}")

    def _report(self) -> str:
        lines = ["no rank can go on:"]
        for rank in range(self.size):
            awaited = self._waiting.get(rank)
            heads = [queue[0] for queue in self._queues.values() if queue and queue[0].rank == rank]
            ahead = [str(op) for op in heads if op is not awaited and not op.done]
            state = "returned" if rank in self._ended else f"waits for {awaited}"
            lines.append(f"rank {rank} {state}" + (f"; its queue is at {'; '.join(ahead)}" if ahead else ""))
        return "\n  ".join(lines)


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
