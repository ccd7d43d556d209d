"""Meters of memory: the bytes that are saved for backward, the peak of a block, and the peak of operators' results."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedBytes:
    """The bytes of the storages that autograd saves for backward, each once, without those of `excluded` tensors.

    With `keep`, the storages live as long as the meter. Otherwise the address of one that is freed may be that of
    another one, and both count once.
    """

    def __init__(self, excluded: Iterable[torch.Tensor], keep: bool = False) -> None:
        self._excluded = {x.untyped_storage()._cdata for x in excluded}
        self._sizes: dict[int, int] = {}
        self._kept: list[torch.Tensor] | None = [] if keep else None

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._excluded:
            self._sizes[storage._cdata] = storage.nbytes()
            if self._kept is not None:
                self._kept.append(x.detach())
        return x.detach()  # x itself refers to the graph node that saves it: a reference cycle that is never freed


def saved(forward: Callable[[], object], *excluded: torch.Tensor) -> int:
    """Return the bytes of the storages that a forward pass saves for backward, without those of `excluded`."""
    meter = SavedBytes(excluded, keep=True)
    with meter.counting():
        forward()
    return meter.bytes


@contextmanager
def peak_memory(device: torch.device) -> Iterator[SimpleNamespace]:
    """Measure the most `bytes` allocated at one time in the block inside, above those before; set when the block ends.

    On CUDA it comes from the allocator's statistics. On a CPU it comes from the profiler's memory events, which include
    the temporary buffers of operators.
    """
    peak = SimpleNamespace(bytes=0)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield peak
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    allocated = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"):
        allocated += size
        peak.bytes = max(peak.bytes, allocated)


class Peak(TorchDispatchMode):
    """Records the peak bytes of operator results, and those of the largest, without the excluded tensors.

    With `size`, only results with a dimension of this size count. Scratch memory inside an operator depends on the
    processor; neither this class nor the planner counts it.
    """

    def __init__(self, *excluded: torch.Tensor, size: int | None = None) -> None:
        super().__init__()
        self.live = self.bytes = self.largest = 0
        self._size, self._lock = size, threading.RLock()  # another rank, which is a thread, may free what this one sent
        self._known = {x.untyped_storage()._cdata for x in excluded}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if not isinstance(x, torch.Tensor) or self._size not in (None, *x.shape):
                continue
            if (storage := x.untyped_storage())._cdata not in self._known:
                address, size = storage._cdata, storage.nbytes()
                with self._lock:
                    self._known.add(address)
                    self.live += size
                    self.bytes, self.largest = max(self.bytes, self.live), max(self.largest, size)
                weakref.finalize(storage, self._freed, address, size)
        return out

    def _freed(self, address: int, size: int) -> None:
        with self._lock:
            self._known.discard(address)
            self.live -= size
