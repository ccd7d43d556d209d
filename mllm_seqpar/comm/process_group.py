"""The transport over torch.distributed: gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mllm_seqpar.errors import TransferError

from .base import ByteCounter, Communicator, Pending, Recv, Send, check_contiguous

T = TypeVar("T")


class _PendingWorks(Pending):
    """The works of one batch_isend_irecv.

    A second `wait()` on a point-to-point Work of gloo never returns, so each handle is dropped after the first.
    """

    def __init__(self, owner: ProcessGroupCommunicator, works: list[Any], what: str) -> None:
        self._owner, self._works, self._what = owner, works, what

    def wait(self) -> None:
        self._require_first_wait()
        while self._works:
            work = self._works.pop(0)
            self._owner._guard(self._what, work.wait)


class ProcessGroupCommunicator(Communicator):
    """Communicator over `group` (None: the default group). Ranks are those of the group, not global ones."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("ProcessGroupCommunicator: torch.distributed is not initialised in this process")
        pg = group if group is not None else dist.group.WORLD
        assert pg is not None
        self.group = pg
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        if self.rank < 0:
            raise ValueError(f"group: this process (global rank {dist.get_rank()}) is not a member of the group given")
        self.bytes = ByteCounter()

    @property
    def identity(self) -> Hashable:
        return self.group

    @property
    def device(self) -> torch.device:
        nccl_only = dist.get_backend(self.group) in ("nccl", "cuda:nccl")
        return torch.device("cuda", torch.cuda.current_device()) if nccl_only else torch.device("cpu")

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        check_contiguous(sends, recvs)
        # Receives come first. gloo announces a ready buffer over the connection that also carries the sends. Behind a
        # large send the announcement would wait, and two ranks would send one after the other instead of both at once.
        ops = [dist.P2POp(dist.irecv, r.buffer, group=self.group, group_peer=r.peer) for r in recvs]
        ops += [dist.P2POp(dist.isend, s.tensor, group=self.group, group_peer=s.peer) for s in sends]
        for s in sends:
            self.bytes.add(s.label, s.tensor.numel() * s.tensor.element_size())
        peers = sorted({s.peer for s in sends} | {r.peer for r in recvs})
        what = f"exchange of {sorted({s.label for s in sends}) or 'data'} with rank(s) {peers}"
        works = self._guard(what, lambda: dist.batch_isend_irecv(ops)) if ops else []
        return _PendingWorks(self, list(works), what)

    def all_gather(self, x: Tensor, label: str = "gather") -> list[Tensor]:
        x = x.contiguous()
        if self.size == 1:
            return [x]
        out = [torch.empty_like(x) for _ in range(self.size)]
        self.bytes.add(label, (self.size - 1) * x.numel() * x.element_size())
        dtype = torch.uint8 if x.dtype is torch.bool else x.dtype  # gloo and NCCL gather bytes, not bools
        self._guard(label, lambda: dist.all_gather([o.view(dtype) for o in out], x.view(dtype), self.group))
        return out

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "reduce_scatter") -> Tensor:
        if self.size == 1:
            return parts[0].clone()
        flat = torch.stack([part.reshape(-1) for part in parts])
        out = torch.empty_like(flat[0])
        self.bytes.add(label, (self.size - 1) * out.numel() * out.element_size())
        self._guard(label, lambda: dist.reduce_scatter_tensor(out, flat.view(-1), group=self.group))
        return out.view(parts[0].shape)

    def all_reduce(self, x: Tensor, label: str = "reduce") -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self.bytes.add(label, 2 * (self.size - 1) * out.numel() * out.element_size() // self.size)
            self._guard(label, lambda: dist.all_reduce(out, group=self.group))
        return out

    def _guard(self, what: str, call: Callable[[], T]) -> T:
        """Run `call`; turn an error of the backend into one that names the transfer and the likely cause."""
        try:
            return call()
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank} of {self.size}: {what} failed: {error}. Another rank of the group has most likely "
                "ended, or is late by more than the process group's timeout; look for its message in its own output"
            ) from error
