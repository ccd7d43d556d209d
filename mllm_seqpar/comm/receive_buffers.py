"""Receive buffers that belong to a communicator and stay allocated over its calls.

Memory that a call frees while NCCL's stream may still use it cannot be allocated again before an event on that stream
has completed, so a step that allocates new receive buffers grows the memory of the allocator and may wait. Buffers
that stay allocated have neither effect.

A buffer may be refilled by a later exchange as soon as the computation that reads it is enqueued on the current stream:
torch makes NCCL's stream wait for the current stream when an exchange is posted, so the new data arrives after that
computation. This holds for one stream only, so buffers of one CUDA stream are never used on another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from math import prod
from operator import itemgetter

import torch
from torch import Tensor

IDLE_CALLS = 1000
"""A buffer that this many calls in a row did not use is freed."""


class ReceiveBuffers:
    """The receive buffers of one communicator, from which each call takes its own by a `BufferLease`.

    Buffers are flat; a tensor takes the shortest free buffer of its kind that is long enough. If all are too short, a
    longer buffer replaces the longest one. The number of buffers of one kind is therefore the largest number that a
    call used at one time, and they are as long as such a call needed. A buffer that `IDLE_CALLS` calls did not use is
    freed, and `clear` frees all.

    Attributes:
        allocations: the number of buffers allocated so far.
        calls: the number of leases so far.
        free: the buffers that no call uses, by kind: (length, number of the call that used it last, flat buffer),
            shortest first.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self.calls = 0
        self.free: defaultdict[Hashable, list[tuple[int, int, Tensor]]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers that no call uses at the moment."""
        return sum(length * flat.element_size() for free in self.free.values() for length, _, flat in free)

    def clear(self) -> None:
        """Free all buffers. A buffer that a call uses is freed when the call ends."""
        self.free = defaultdict(list)


class BufferLease:
    """The buffers of `owner` that one call uses, a context manager.

    Calls may be nested or interleaved; no two of them share a buffer. If a call raises, the buffers that it uses are
    dropped and not reused, because a posted receive may still write to them.
    """

    def __init__(self, owner: ReceiveBuffers) -> None:
        owner.calls += 1
        self._owner, self._free = owner, owner.free  # `clear` replaces the owner's
        self.used: dict[int, tuple[Hashable, Tensor, Tensor]] = {}
        """By id of the tensor that `take` returned: (kind, flat buffer, that tensor)."""
        self._places: dict[torch.device, Hashable] = {}

    def __enter__(self) -> BufferLease:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            return
        if self.used:
            self.give(list(self.used))
        oldest = self._owner.calls - IDLE_CALLS
        for free in self._owner.free.values():
            for index in reversed(range(len(free))):
                if free[index][1] <= oldest:
                    del free[index]

    def take(self, kind: Hashable, like: Tensor, length: int) -> Tensor:
        """Return a contiguous buffer like `like` (B, H, S, ...), with `length` instead of S.

        Buffers are shared by tensors of equal `kind`, dtype, device and CUDA stream.
        """
        shape = (*like.shape[:2], length, *like.shape[3:])
        size = prod(shape)
        if not size:
            return like.new_empty(shape)
        place = self._places.get(like.device)
        if place is None:  # what tensors that may reuse each other's memory have in common
            on_stream = like.is_cuda and torch.cuda.is_initialized()  # fake CUDA tensors have no streams
            stream = torch.cuda.current_stream(like.device).cuda_stream if on_stream else 0
            place = self._places[like.device] = like.device, stream, getattr(like, "fake_mode", None)
        kind = kind, like.dtype, place
        free, index = self._owner.free[kind], 0
        while index < len(free) - 1 and free[index][0] < size:
            index += 1
        reused = free.pop(index) if free else None  # the shortest that is long enough, or else the longest
        if reused is not None and reused[0] >= size:
            flat = reused[2]
        else:
            self._owner.allocations += 1
            with torch.inference_mode(False):  # an inference tensor could not be refilled outside inference mode
                flat = torch.empty(size, dtype=like.dtype, device=like.device)
        tensor = (flat if flat.numel() == size else flat[:size]).view(shape)
        self.used[id(tensor)] = kind, flat, tensor
        return tensor

    def give(self, tensors: Iterable[Tensor | int]) -> None:
        """Return buffers whose content is no longer used by anything that is enqueued later."""
        for tensor in tensors:
            leased = self.used.pop(tensor if isinstance(tensor, int) else id(tensor), None)
            if leased is not None and self._owner.free is self._free:  # otherwise `clear` was called meanwhile
                kind, flat, _ = leased
                free = self._free[kind]
                free.append((flat.numel(), self._owner.calls, flat))
                if len(free) > 1:
                    free.sort(key=itemgetter(0))
