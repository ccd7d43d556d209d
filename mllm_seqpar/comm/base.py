"""One rank's view of a group of ranks: a grouped one-hop exchange and the few collectives that the package needs.

Why so small a surface: schedules (`mllm_seqpar.schedules`) are data, and the executor that runs them knows
only `exchange`. Two transports implement it: `process_group` over torch.distributed, and `loopback`, which runs all
ranks as threads of one process, so that one GPU, or none, can run every schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .byte_counter import ByteCounter


class Send(NamedTuple):
    """A contiguous tensor that leaves for rank `peer` of the group; `label` is where its bytes are counted."""

    peer: int
    tensor: Tensor
    label: str


class Recv(NamedTuple):
    """A contiguous buffer to be filled by rank `peer` of the group."""

    peer: int
    buffer: Tensor


class Pending(ABC):
    """A posted exchange. The sent tensors must not change, nor the buffers be read, before `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks (on CUDA: makes the current stream wait) until every tensor was sent and received. Once only."""


class Communicator(ABC):
    """One rank's view of a group: `rank`, `size`, what it sent (`bytes`), and the transfers.

    Every method that moves data is collective: all ranks call it, in the same order, with matching arguments.
    """

    rank: int
    size: int
    bytes: ByteCounter

    @abstractmethod
    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        """Posts all sends and receives as ONE group. Per pair of ranks, messages match in the order they are listed."""

    @abstractmethod
    def all_gather(self, x: Tensor, label: str = "gather") -> list[Tensor]:
        """x of equal shape and dtype on every rank -> the list of all ranks' x, by rank."""

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "reduce_scatter") -> Tensor:
        """parts[r] is this rank's contribution to rank r -> the sum of all contributions to this rank."""

    @abstractmethod
    def all_reduce(self, x: Tensor, label: str = "reduce") -> Tensor:
        """x -> the sum over ranks, as a new tensor. Not differentiable: see `mllm_seqpar.comm.autograd`."""

    def broadcast(self, x: Tensor, label: str = "broadcast") -> Tensor:
        """Rank 0's x on every rank, as a new tensor; x has the same shape and dtype everywhere."""
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
        """One short list of int64 of equal length on every rank -> all ranks' lists. Synchronises with the host."""
        if self.size == 1:
            return [list(values)]
        x = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        return torch.stack(self.all_gather(x, "agreement")).tolist()  # one wait for the device, not one a rank

    def gather_texts(self, text: str) -> list[str]:
        """One text of any length on every rank -> all ranks' texts, by rank. Synchronises with the host."""
        if self.size == 1:
            return [text]
        raw = text.encode()
        lengths = [row[0] for row in self.gather_ints([len(raw)])]
        padded = raw.ljust(max(*lengths, 1), b"\0")
        x = torch.tensor(list(padded), dtype=torch.uint8, device=self.device)
        rows = self.all_gather(x, "agreement")
        return [bytes(row.tolist()[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    @property
    @abstractmethod
    def identity(self) -> Hashable:
        """Equal for two communicators that are the same rank of the same group, for what is kept per group.

        It refers to the group itself, so that no other group can come to have the same identity while it is kept.
        """

    @property
    def device(self) -> torch.device:
        """Where this transport wants small control tensors to live."""
        return torch.device("cpu")


def check_contiguous(sends: Sequence[Send], recvs: Sequence[Recv]) -> None:
    """Raises ValueError for a tensor that a transport would silently send wrong."""
    for peer, tensor, label in sends:
        if not tensor.is_contiguous():
            raise ValueError(f"exchange: the tensor {label!r} for rank {peer} is not contiguous; call .contiguous()")
    for peer, buffer in recvs:
        if not buffer.is_contiguous():
            raise ValueError(f"exchange: the buffer for what rank {peer} sends is not contiguous")
