"""The transport over torch.distributed: gloo on CPU, NCCL on CUDA.

With gloo, a transfer with a rank that has ended raises `TransferError` at once. With NCCL it cannot: `Pending.wait`
only makes the current stream wait, and the host continues. Torch's watchdog ends the process when the group's timeout
has passed, and its log names the operation and the group "mllm_seqpar transfers".

NCCL can hang if one group of calls has more than 256 sends and receives. It distributes them over several kernels, and
a send can be in an earlier kernel than its receive (pytorch/pytorch issue 174288). An exchange is therefore launched in
rounds (`message_rounds`). The sender and the receiver place a message in the same round without communication: the
round follows from the distance of the two ranks, the same in both directions, and from how many messages precede it
between the two.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mllm_seqpar._compat import SINGLE_TENSOR_COLLECTIVES
from mllm_seqpar.errors import TransferError

from .backends import backends_of
from .base import Communicator, GroupState, Pending, Recv, Send, TransferCounter
from .transfer_group import is_open

MESSAGES_PER_PAIR = 8
"""The number of messages between two ranks that always fit in a round, so that a ring step is not divided."""


def message_rounds(
    rank: int, size: int, sends: Sequence[Send], recvs: Sequence[Recv], limit: int | None
) -> Iterator[tuple[list[Send], list[Recv]]]:
    """Yield the sends and receives of each round in which this rank has any.

    Args:
        rank, size: of this rank and its group.
        sends, recvs: of the exchange. Messages between two ranks stay in their order.
        limit: the largest number of sends plus receives of a rank in one round, at least 4. None: one round.
    """
    if limit is None:
        if sends or recvs:
            yield list(sends), list(recvs)
        return
    # A rank sends to two peers at each distance, and receives from them: four times the messages of a pair.
    per_pair = max(min(MESSAGES_PER_PAIR, limit // 4), limit // (4 * max(1, size // 2)))
    distances = limit // (4 * per_pair)
    peers = {send.peer for send in sends} | {recv.peer for recv in recvs}
    place = {peer: (min((peer - rank) % size, (rank - peer) % size) - 1) // distances for peer in peers}
    if max(len(sends), len(recvs)) <= per_pair and len(set(place.values())) == 1:  # as in each step of a ring
        yield list(sends), list(recvs)
        return

    def numbered(peers: Sequence[int]) -> Iterator[tuple[int, int]]:
        earlier: Counter[int] = Counter()
        for peer in peers:
            yield earlier[peer] // per_pair, place[peer]
            earlier[peer] += 1

    rounds: dict[tuple[int, int], tuple[list[Send], list[Recv]]] = {}
    for number, send in zip(numbered([s.peer for s in sends]), sends, strict=True):
        rounds.setdefault(number, ([], []))[0].append(send)
    for number, recv in zip(numbered([r.peer for r in recvs]), recvs, strict=True):
        rounds.setdefault(number, ([], []))[1].append(recv)
    for number in sorted(rounds):
        yield rounds[number]


T = TypeVar("T")

NCCL_GROUP_LIMIT = 256
"""The largest number of point-to-point operations in one group of NCCL calls; see `message_rounds`."""


class _UncheckedMessage(dist.P2POp):
    """A message for `dist.batch_isend_irecv`, without the checks of `P2POp`, `isend` and `irecv`.

    Those take longer than the launch: about 40 calls for each message, and a step of backward has up to six messages.
    """

    def __new__(cls, *_: object) -> Self:
        return object.__new__(cls)

    def __init__(self, op: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup, peer: int) -> None:
        self.op, self.tensor, self.group, self.group_peer, self.tag = op, tensor, group, peer, 0


def _send(tensor: Tensor, group: dist.ProcessGroup, tag: int, **peers: int) -> Any:
    (peer,) = peers.values()  # torch names it group_src or group_dst
    return group.send([tensor], peer, tag)


def _receive(tensor: Tensor, group: dist.ProcessGroup, tag: int, **peers: int) -> Any:
    (peer,) = peers.values()
    return group.recv([tensor], peer, tag)


class _ExchangedMessages(NamedTuple):
    """The messages of an exchange, which an error names."""

    sends: Sequence[Send]
    recvs: Sequence[Recv]

    def __str__(self) -> str:
        peers = sorted({s.peer for s in self.sends} | {r.peer for r in self.recvs})
        return f"exchange of {sorted({s.label for s in self.sends}) or 'data'} with rank(s) {peers}"


class _PendingWorks(Pending):
    """The works of one exchange.

    A second `wait()` on a point-to-point Work of gloo never returns, so each handle is dropped after the first.
    """

    def __init__(self, owner: ProcessGroupCommunicator, works: list[Any], exchange: _ExchangedMessages) -> None:
        self._owner, self._works, self._exchange = owner, works, exchange

    def wait(self) -> None:
        if self._works:
            start = time.perf_counter()
            self._owner._guard(self._exchange, self._wait)
            self._owner.bytes.waited += time.perf_counter() - start
            self._exchange = _ExchangedMessages((), ())  # frees the tensors

    def _wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
"""All communicators of a group share its state, so that functional calls also keep it."""


class ProcessGroupCommunicator(Communicator):
    """Communicator over `group` (None: the default group). Ranks are numbers within the group, not global ranks.

    Args:
        group: the group that the caller names; `identity` refers to it.
        transfers: a process group of the same ranks in the same order, which carries the transfers. None: `group`.

    Attributes:
        operation_limit: the largest number of sends and receives that are launched as one group; None: any number.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, transfers: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("ProcessGroupCommunicator: torch.distributed is not initialised in this process")
        pg = group if group is not None else dist.group.WORLD
        assert pg is not None
        self.group = pg
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        if self.rank < 0:
            raise ValueError(f"group: this process (global rank {dist.get_rank()}) is not a member of the group given")
        self.bytes = TransferCounter()
        self.transfers = pg if transfers is None else transfers
        self._backends = backends_of(self.transfers)
        self.kept = _states.setdefault(pg, GroupState())
        self.operation_limit = NCCL_GROUP_LIMIT if self.uses_nccl else None

    @property
    def uses_nccl(self) -> bool:
        """Whether CUDA tensors are sent by NCCL."""
        return self._backends.get("cuda") == "nccl"

    @property
    def identity(self) -> Hashable:
        return self.group

    @property
    def is_open(self) -> bool:
        return is_open(self.transfers)

    @property
    def device(self) -> torch.device:
        nccl_only = dist.get_backend(self.group) in ("nccl", "cuda:nccl")
        return torch.device("cuda", torch.cuda.current_device()) if nccl_only else torch.device("cpu")

    @property
    def control_device(self) -> torch.device:
        return torch.device("cpu") if "cpu" in self._backends else self.device

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        for _, tensor, label in sends:
            self.bytes.sent[label] += tensor.nbytes
            self.bytes.messages[label] += 1
        exchange = _ExchangedMessages(sends, recvs)
        return _PendingWorks(self, self._guard(exchange, functools.partial(self._launch, exchange)), exchange)

    def _launch(self, exchange: _ExchangedMessages) -> list[Any]:
        works: list[Any] = []
        for sends, recvs in message_rounds(self.rank, self.size, *exchange, self.operation_limit):
            # Receives come first. gloo announces a ready buffer over the connection that also carries the sends. Behind
            # a large send the announcement would wait, and two ranks would send one after the other, not both at once.
            messages: list[dist.P2POp] = [
                _UncheckedMessage(_receive, buffer, self.transfers, peer) for peer, buffer in recvs
            ]
            messages += [_UncheckedMessage(_send, tensor, self.transfers, peer) for peer, tensor, _ in sends]
            works += dist.batch_isend_irecv(messages)
        return works

    def all_gather(self, x: Tensor, label: str = "gather") -> list[Tensor]:
        x = x.detach().contiguous()
        if self.size == 1:
            return [x]
        out = x.new_empty((self.size, *x.shape))
        self.bytes.add(label, (self.size - 1) * x.numel() * x.element_size())
        dtype = torch.uint8 if x.dtype is torch.bool else x.dtype  # gloo and NCCL gather bytes, not bools
        flat, mine = out.view(dtype).view(-1), x.view(dtype).view(-1)
        self._collective(label, lambda: _single_tensor_collectives()[0](flat, mine, group=self.transfers))
        return [part.detach() for part in out.unbind(0)]  # for autograd, they are not views of one tensor

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "reduce_scatter") -> Tensor:
        if self.size == 1:
            return parts[0].clone()
        flat = torch.stack([part.reshape(-1) for part in parts])
        out = torch.empty_like(flat[0])
        self.bytes.add(label, (self.size - 1) * out.numel() * out.element_size())
        self._collective(label, lambda: _single_tensor_collectives()[1](out, flat.view(-1), group=self.transfers))
        return out.view(parts[0].shape)

    def all_reduce(self, x: Tensor, label: str = "reduce") -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self.bytes.add(label, 2 * (self.size - 1) * out.numel() * out.element_size() // self.size)
            self._collective(label, lambda: dist.all_reduce(out, group=self.transfers))
        return out

    def _collective(self, label: str, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        self._guard(label, call)
        self.bytes.waited += time.perf_counter() - start

    def _guard(self, what: object, call: Callable[[], T]) -> T:
        """Run `call`; turn an error of the backend into one that names the transfer, `what`, and the likely cause."""
        if not self.is_open:
            raise TransferError(
                f"rank {self.rank} of {self.size}: {what}: the process group is destroyed; call unpatch_model and "
                "patch_model again, or destroy the group later"
            )
        try:
            return call()
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank} of {self.size}: {what} failed: {error}. Another rank of the group has most likely "
                "ended, or is late by more than the process group's timeout; look for its message in its own output"
            ) from error


def _single_tensor_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return torch's all-gather and reduce-scatter between one tensor of all ranks and one of this rank."""
    if SINGLE_TENSOR_COLLECTIVES.applies():
        return dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    return dist.all_gather_single, dist.reduce_scatter_single
