"""Meters of memory: the bytes that a forward pass saves for backward, and the peak of operators' results."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def saved(forward: Callable[[], object], *excluded: torch.Tensor) -> int:
    """Return the bytes of the storages that a forward pass saves for backward, without those of `excluded`."""
    excluded_storages = {x.untyped_storage()._cdata for x in excluded}
    sizes, alive = {}, []

    def save(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in excluded_storages:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(x.detach())  # otherwise the address would be reused, and two storages counted once
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        forward()
    return sum(sizes.values())


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
