"""The queues, the memory and the scheduler of the model of NCCL; `nccl_model` has its rules and its interface."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.errors import TransferError

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
