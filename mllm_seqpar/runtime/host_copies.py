"""Copies between host memory and the device, chunk by chunk, beside the computation.

`HostCopies` copies a chunk to the device on a separate stream, while the current stream computes with the chunk before
it. There are two buffers on the device. Two events order their use:

    ready   recorded on the copy stream after a buffer is filled; the current stream waits for it before it computes
    free    recorded on the current stream after the computation is enqueued; the copy stream waits before it refills

Only copies from and to pinned memory are asynchronous to the host. The host first copies other memory (a mapped file)
to a pinned buffer. The device does not wait for this, because its computation with the previous chunk is already
enqueued. On the CPU a chunk is a view of the host tensor, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class CudaStreams:
    """The functions of `torch.cuda` that the copies use."""

    def copy_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def event(self) -> Any:
        return torch.cuda.Event()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which operators are enqueued on `stream`."""
        return torch.cuda.stream(stream)

    def is_pinned(self, x: Tensor) -> bool:
        return x.is_pinned()

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def device_empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def keep(self, x: Tensor, stream: Any) -> None:
        """Prevent the memory of `x` from being reused before the work that is enqueued on `stream` when `x` is
        freed."""
        x.record_stream(stream)


class _Slot:
    """A buffer on the device for one chunk, its events, and a pinned buffer if the host tensor is not pinned."""

    def __init__(self, streams: CudaStreams, like: Tensor, device: torch.device) -> None:
        self.buffer = streams.device_empty(like.shape, like.dtype, device)
        self.ready, self.free = streams.event(), streams.event()
        self.pinned: Tensor | None = None


class HostCopies:
    """Copies of chunks between host tensors and `device`; created once per forward pass, for all its layers."""

    def __init__(self, device: torch.device, streams: CudaStreams | None = None) -> None:
        self.device, self._streams = device, streams or CudaStreams()
        self._slots: dict[str, tuple[_Slot, _Slot]] = {}

    @cached_property
    def _stream(self) -> Any:
        return self._streams.copy_stream(self.device)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in host memory, pinned if the device is a CUDA device."""
        if self.device.type != "cuda":
            return torch.empty(*shape, dtype=dtype)
        return self._streams.pinned_empty(shape, dtype)

    def to_device(self, name: str, host: Tensor, chunks: Sequence[slice]) -> Iterator[Tensor]:
        """Start copying the first chunk, and return an iterator over ``host[chunk]`` on the device.

        A chunk must not be used after the next one is requested. The iterator must be exhausted.

        Args:
            name: of the buffers; iterators that are used at the same time have different names.
            host: (frames, ...) in host memory.
            chunks: ranges of frames; the first is the longest.
        """
        if self.device.type != "cuda":
            return (host[chunk] for chunk in chunks)
        pinned = self._streams.is_pinned(host)
        self._start(self._slot(name, host[chunks[0]], 0), host[chunks[0]], pinned)
        return self._chunks(name, host, chunks, pinned)

    def _chunks(self, name: str, host: Tensor, chunks: Sequence[slice], pinned: bool) -> Iterator[Tensor]:
        current = self._streams.current(self.device)
        for number, chunk in enumerate(chunks):
            slot = self._slots[name][number % 2]
            current.wait_event(slot.ready)
            yield slot.buffer[: chunk.stop - chunk.start]
            slot.free.record(current)
            if number + 1 < len(chunks):
                following = host[chunks[number + 1]]
                self._start(self._slot(name, host[chunks[0]], number + 1), following, pinned)

    def _slot(self, name: str, like: Tensor, number: int) -> _Slot:
        slots = self._slots.get(name)
        if slots is None or slots[0].buffer.shape != like.shape or slots[0].buffer.dtype != like.dtype:
            slots = _Slot(self._streams, like, self.device), _Slot(self._streams, like, self.device)
            self._slots[name] = slots
            for slot in slots:
                # The memory may have been used on the current stream before, and may not be freed during a copy.
                slot.free.record(self._streams.current(self.device))
                self._streams.keep(slot.buffer, self._stream)
        return slots[number % 2]

    def _start(self, slot: _Slot, part: Tensor, pinned: bool) -> None:
        if not pinned:
            if slot.pinned is None:
                slot.pinned = self._streams.pinned_empty(slot.buffer.shape, part.dtype)
            slot.ready.synchronize()  # the previous copy from this pinned buffer
            part = slot.pinned[: part.shape[0]].copy_(part)
        with self._streams.on(self._stream):
            self._stream.wait_event(slot.free)
            slot.buffer[: part.shape[0]].copy_(part, non_blocking=True)
            slot.ready.record(self._stream)

    def to_host(self, x: Tensor, target: Tensor) -> None:
        """Copy `x`, which the current stream computes, to pinned host memory; `wait` waits for it."""
        if self.device.type != "cuda":
            target.copy_(x)
            return
        computed = self._streams.event()
        computed.record(self._streams.current(self.device))
        self._streams.keep(x, self._stream)
        with self._streams.on(self._stream):
            self._stream.wait_event(computed)
            target.copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Make the host wait until all copies have ended."""
        if self.device.type == "cuda":
            self._stream.synchronize()

    def release(self) -> None:
        """Free the buffers on the device, which later copies allocate again."""
        self._slots.clear()
