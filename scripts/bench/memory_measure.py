"""What a training step holds: bytes kept for its backward pass, and the most that was allocated at one time.

Kept: what autograd saves, each storage once, parameters and the features left out. Peak: on CUDA by the allocator
(`max_memory_allocated`); on CPU by the allocator's events, as the profiler records them, with what kernels allocate for
themselves. Both begin before the features exist and after parameters and their gradients do: these are not in them,
features and their gradient are in the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    """The most bytes that were allocated at one time, above those before; set when the block is left."""

    bytes: int = 0


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """Measures the allocations of a block of code."""
    found = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found.bytes = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    held = 0
    for _, size in events:
        held += size
        found.bytes = max(found.bytes, held)


class Kept:
    """The storages that a forward pass saves for backward; use it around the forward pass only."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        self._given = {x.untyped_storage().data_ptr() for x in given}
        self._sizes: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Of all of them but those given."""
        return sum(size for place, size in self._sizes.items() if place not in self._given)

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context to run the forward pass in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self._sizes[storage.data_ptr()] = storage.nbytes()
        return x.detach()  # itself would hold the node that saves it, which holds it, for ever


@dataclass(frozen=True)
class Held:
    """Bytes of one training step on one rank."""

    kept: int
    peak: int


def held_by(
    features_of: Callable[[], Tensor], loss_of: Callable[[Tensor], Tensor], parameters: Iterable[Tensor]
) -> Held:
    """One step: features are made, then forward and backward.

    Args:
        features_of: makes the features, which want a gradient.
        loss_of: the forward pass, from the features.
        parameters: those of the model; they have gradients already, to which those of this step are added.
    """
    parameters = list(parameters)
    with peak_of(parameters[0].device) as peak:
        features = features_of()
        kept = Kept([*parameters, features])
        with kept.counting():
            loss = loss_of(features)
        loss.backward()
        del loss, features
    return Held(kept.bytes, peak.bytes)
