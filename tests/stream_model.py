"""A model of CUDA's streams and events that finds races of `runtime.host_copies`; tensors are on the CPU.

Operators run at once, but each belongs to the host, to the current stream or to the copy stream, and each of these has
a vector clock. Recording an event copies the clock of a stream, waiting for it merges that clock, and an operator that
the host enqueues comes after everything that the host did before. Two operators on the same memory, one of which
writes, are a race unless one of them happens before the other. Memory of the host is accessed by the host itself, or by
the copy stream; buffers of the device by the current stream, or by the copy stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mllm_seqpar.runtime.host_copies import HostCopies

Clock = dict[str, int]


class Race(AssertionError):
    """Two operators use the same memory in no defined order."""


def merge(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


class _Stream:
    def __init__(self, model: StreamModel, name: str) -> None:
        self.model, self.name, self.clock = model, name, Clock()

    def wait_event(self, event: _Event) -> None:
        merge(self.clock, event.clock)

    def synchronize(self) -> None:
        merge(self.model.host.clock, self.clock)


class _Event:
    def __init__(self, model: StreamModel) -> None:
        self.model, self.clock = model, Clock()

    def record(self, stream: _Stream) -> None:
        merge(stream.clock, self.model.host.clock)
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        merge(self.model.host.clock, self.clock)


class StreamModel(TorchDispatchMode):
    """Takes the place of `CudaStreams`; as a context it watches the operators of this thread.

    Attributes:
        copies: the number of copies on the copy stream.
    """

    def __init__(self, pins_hosts: bool = True) -> None:
        super().__init__()
        self.host, self.compute, self.copying = (_Stream(self, name) for name in ("host", "compute", "copy"))
        self._active: _Stream | None = None
        self._pins_hosts = pins_hosts
        self._tracked: dict[int, tuple[str, Tensor]] = {}
        self._accesses: dict[int, list[tuple[str, int, bool]]] = {}
        self.copies = 0

    def copy_stream(self, device: torch.device) -> _Stream:
        return self.copying

    def current(self, device: torch.device) -> _Stream:
        return self.compute

    def event(self) -> _Event:
        return _Event(self)

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        self._active = stream
        try:
            yield
        finally:
            self._active = None

    def is_pinned(self, x: Tensor) -> bool:
        return self._pins_hosts or self._key(x) in self._tracked

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._track("host", torch.empty(*shape, dtype=dtype))

    def device_empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._track("compute", torch.empty(*shape, dtype=dtype))

    def keep(self, x: Tensor, stream: _Stream) -> None:
        if self._key(x) not in self._tracked:
            self._track("compute", x)
            time = self.compute.clock.get("compute", 0)  # of the operator that computed it, at the latest
            self._accesses[self._key(x)] = [("compute", time, True, 0, x.untyped_storage().nbytes())]

    def _track(self, owner: str, x: Tensor) -> Tensor:
        self._tracked[self._key(x)] = owner, x  # also keeps the memory from being used again
        return x

    def _key(self, x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += self._active is not None
        if self._active is None:
            self.compute.clock["compute"] = self.compute.clock.get("compute", 0) + 1
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if argument.alias_info is None or written:  # others are views, which access nothing
                for x in tree_leaves(value):
                    if isinstance(x, Tensor) and self._key(x) in self._tracked:
                        self._access(x, written, str(func))
        return func(*args, **(kwargs or {}))

    def _access(self, x: Tensor, write: bool, what: str) -> None:
        """Check an access against the earlier ones of overlapping memory, and add it to them."""
        owner = self._tracked[self._key(x)][0]
        stream = self._active or (self.host if owner == "host" else self.compute)
        merge(stream.clock, self.host.clock)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        place = x.storage_offset(), x.storage_offset() + x.numel()
        earlier = self._accesses.setdefault(self._key(x), [])
        for name, time, wrote, start, stop in earlier:
            overlaps = place[0] < stop and start < place[1]
            if overlaps and (write or wrote) and stream.clock.get(name, 0) < time:
                raise Race(f"{what} on stream {stream.name!r} does not wait for stream {name!r}")
        earlier.append((stream.name, stream.clock[stream.name], write, *place))


def on_model(monkeypatch: Any, model: StreamModel) -> None:
    """Make `HostCopies` copy as for a CUDA device, over the model."""
    from mllm_seqpar.runtime import offload

    monkeypatch.setattr(offload, "HostCopies", lambda device: HostCopies(torch.device("cuda"), model))
