"""One rank's view of a group of ranks: a grouped one-hop exchange, and the few collectives that the package needs.

The interface is small because schedules (`mllm_seqpar.schedules`) are data and the executor that runs them calls
nothing but `exchange`. Two transports implement it: `process_group` over torch.distributed, and `loopback`, which runs
all ranks as threads of one process, so that one GPU, or none, can run every schedule. `ExchangeCollectives` builds the
collectives from `exchange`, for `loopback` and for `Subgroup`.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.digests import fingerprint

from .receive_buffers import ReceiveBuffers


class TransferCounter:
    """Counts what one rank has sent, and how long it has waited for transfers, since the last ``reset``.

    The transport counts a message when it posts it. A collective is counted as a ring of one-hop sends: an all-gather
    of x bytes among n ranks is ``(n - 1) * x``.

    Attributes:
        sent: bytes by label.
        messages: the number of messages by label.
        waited: seconds that the host waited for transfers to complete: communication that no computation overlapped.
            With NCCL the host does not wait, so the number is meaningless there.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.waited = 0.0

    def add(self, label: str, nbytes: int, messages: int = 1) -> None:
        self.sent[label] += nbytes
        self.messages[label] += messages

    @property
    def total(self) -> int:
        """Bytes sent under all labels."""
        return sum(self.sent.values())

    def reset(self) -> None:
        self.sent.clear()
        self.messages.clear()
        self.waited = 0.0

    def __repr__(self) -> str:
        return f"TransferCounter(total={self.total}, sent={dict(self.sent)})"


class Send(NamedTuple):
    """A contiguous tensor for rank `peer` of the group; its bytes are counted under `label`."""

    peer: int
    tensor: Tensor
    label: str


class Recv(NamedTuple):
    """A contiguous buffer that rank `peer` of the group fills."""

    peer: int
    buffer: Tensor


class Pending(ABC):
    """A posted exchange. Sent tensors must not change, and buffers must not be read, before `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Block until every tensor is sent and received. A second call does nothing.

        With NCCL it makes the current stream wait and returns. It then raises nothing if another rank is lost: torch's
        watchdog ends the process after the process group's timeout.
        """


@dataclass
class GroupState:
    """The state that the communicators of one group share and keep over calls.

    Attributes:
        buffers: the receive buffers.
        nodes: see `Communicator.nodes`; None before its first use.
    """

    buffers: ReceiveBuffers = field(default_factory=ReceiveBuffers)
    nodes: tuple[int, ...] | None = None


class Communicator(ABC):
    """One rank's view of a group: `rank`, `size`, the bytes that it sent (`bytes`), and the transfers.

    Every method that moves data is collective: all ranks call it in the same order with matching arguments.
    """

    rank: int
    size: int
    bytes: TransferCounter
    kept: GroupState

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank, numbered in the order of the first rank of each node; the first use is collective.

        Ranks share a node if their host name and the boot id of their kernel are equal, which is how NCCL decides
        whether two ranks can use the links inside a node. As in NCCL, NCCL_HOSTID replaces both where it is set.
        """
        # Not a cached property: in Python 3.11 all instances share its lock, and ranks that are threads would deadlock.
        if self.kept.nodes is None:
            hosts = [row[0] for row in self.gather_ints([fingerprint(host_identity())])]
            numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
            self.kept.nodes = tuple(numbers[host] for host in hosts)
        return self.kept.nodes

    @property
    def ring(self) -> tuple[int, ...]:
        """The ranks node by node, the order of every ring; the first use is collective.

        A ring in this order has one link into each node and one out of it, whatever numbers the launcher gave. Only the
        partners of a rank follow from it: rank r keeps its own query rows and keys.
        """
        nodes = self.nodes
        return tuple(sorted(range(self.size), key=nodes.__getitem__))

    @property
    def alone(self) -> Communicator:
        """The group that consists of only this rank."""
        return self if self.size == 1 else Subgroup(self, [self.rank])

    @abstractmethod
    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        """Post all sends and receives as one group. Messages between two ranks match in the order of the lists."""

    @abstractmethod
    def all_gather(self, x: Tensor, label: str = "gather") -> list[Tensor]:
        """x of equal shape and dtype on every rank -> the list of all ranks' x, by rank."""

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "reduce_scatter") -> Tensor:
        """parts[r], this rank's contribution to rank r -> the sum of all contributions to this rank."""

    @abstractmethod
    def all_reduce(self, x: Tensor, label: str = "reduce") -> Tensor:
        """x -> the sum over ranks, as a new tensor. Not differentiable: see `mllm_seqpar.comm.autograd`."""

    def exchange_with_all(self, tensors: Sequence[Tensor], label: str) -> list[Tensor]:
        """Send tensors[r] to rank r; return what each rank sent to this one, all of the shape of this rank's own."""
        sends, recvs, received = [], [], list(tensors)
        for peer in range(self.size):
            if peer != self.rank:
                received[peer] = torch.empty_like(tensors[self.rank])
                sends.append(Send(peer, tensors[peer], label))
                recvs.append(Recv(peer, received[peer]))
        self.exchange(sends, recvs).wait()
        return received

    def broadcast(self, x: Tensor, label: str = "broadcast") -> Tensor:
        """x of equal shape and dtype on every rank -> rank 0's x, as a new tensor."""
        if self.size == 1:
            return x.clone()
        if self.rank == 0:
            x = x.contiguous()
            self.exchange([Send(peer, x, label) for peer in range(1, self.size)], []).wait()
            return x.clone()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.exchange([], [Recv(0, out)]).wait()
        return out

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """int64 lists of equal length on every rank -> all ranks' lists. The host waits for them."""
        if self.size == 1:
            return [list(values)]
        x = torch.tensor(list(values), dtype=torch.int64, device=self.control_device)
        return torch.stack(self.all_gather(x, "agreement")).tolist()  # one synchronisation, not one per rank

    def gather_texts(self, text: str) -> list[str]:
        """One text of any length on every rank -> all ranks' texts, by rank. The host waits for them."""
        if self.size == 1:
            return [text]
        raw = text.encode(errors="surrogatepass")  # names of files may have half of a surrogate pair
        lengths = [row[0] for row in self.gather_ints([len(raw)])]
        padded = raw.ljust(max(*lengths, 1), b"\0")
        x = torch.tensor(list(padded), dtype=torch.uint8, device=self.control_device)
        rows = self.all_gather(x, "agreement")
        return [
            bytes(row.tolist()[:length]).decode(errors="surrogatepass")
            for row, length in zip(rows, lengths, strict=True)
        ]

    @property
    @abstractmethod
    def identity(self) -> Hashable:
        """A key for caches per group, equal for communicators that are the same rank of the same group.

        It refers to the group itself, so no other group can have the same identity while the key exists.
        """

    @property
    def is_open(self) -> bool:
        """Whether the group can still transfer."""
        return True

    @property
    def device(self) -> torch.device:
        """The device whose tensors the group's backend transfers; the CPU if it transfers from several devices."""
        return torch.device("cpu")

    @property
    def control_device(self) -> torch.device:
        """The device of integers and texts that ranks compare: the CPU if possible, so that no GPU is synchronised."""
        return self.device


def host_identity() -> str:
    """Return a text that is equal for all processes of a node, and differs between nodes."""
    if given := os.environ.get("NCCL_HOSTID"):
        return given
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot_id.read_text().strip() if boot_id.exists() else "")


class ExchangeCollectives(Communicator):
    """A communicator whose collectives are one grouped exchange each."""

    def all_gather(self, x: Tensor, label: str = "gather") -> list[Tensor]:
        x = x.detach().contiguous()
        return self.exchange_with_all([x] * self.size, label)

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "reduce_scatter") -> Tensor:
        received = self.exchange_with_all([part.detach().contiguous() for part in parts], label)
        return torch.stack(received).sum(0)  # in the order of ranks, so that the bits are the same in every run

    def all_reduce(self, x: Tensor, label: str = "reduce") -> Tensor:
        return torch.stack(self.all_gather(x, label)).sum(0)


class Subgroup(ExchangeCollectives):
    """The ranks `members` of `parent`, numbered from 0 in that order, over the transport of `parent`.

    No process group is created, and the other ranks of `parent` need not take part. Bytes are counted by `parent`.
    """

    def __init__(self, parent: Communicator, members: Sequence[int]) -> None:
        self._parent, self._members = parent, tuple(members)
        self.rank, self.size, self.bytes = self._members.index(parent.rank), len(self._members), parent.bytes
        self.kept = parent.kept

    @property
    def nodes(self) -> tuple[int, ...]:
        nodes = self._parent.nodes
        return tuple(nodes[member] for member in self._members)

    @property
    def identity(self) -> Hashable:
        return (self._parent.identity, self._members) if self.size > 1 else None

    @property
    def device(self) -> torch.device:
        return self._parent.device

    @property
    def control_device(self) -> torch.device:
        return self._parent.control_device

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        return self._parent.exchange(
            [send._replace(peer=self._members[send.peer]) for send in sends],
            [recv._replace(peer=self._members[recv.peer]) for recv in recvs],
        )
