"""Helpers of `chunked_mlp`, which recomputes a module in backward: RNG replay and detached parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True)
class RNGState:
    """The state of the CPU's random number generator and of the generators of one device type."""

    cpu: Tensor
    device_type: str
    devices: list[int]  # indices, empty for the CPU
    states: list[Tensor]  # of the generators of `devices`

    @classmethod
    def current(cls, x: Tensor) -> RNGState:
        """Return the state of the CPU and of the device of `x`."""
        return cls(torch.get_rng_state(), x.device.type, *get_device_states(x))

    def equals(self, other: RNGState) -> bool:
        """Return whether no random numbers were drawn between the two states."""
        pairs = zip([self.cpu, *self.states], [other.cpu, *other.states], strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states, device_type=self.device_type)


@contextmanager
def rng_replay(state: RNGState | None, x: Tensor) -> Iterator[None]:
    """Replay on the CPU and the device of `x` what was drawn after `state` (None: nothing), and restore afterwards."""
    if state is None:
        yield
        return
    outside = RNGState.current(x)
    state.restore()
    try:
        yield
    finally:
        outside.restore()


def trained_parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that require grad, each once, in an order that depends on the modules only.

    `Module.parameters` takes as long as a small projection.
    """
    found: dict[int, nn.Parameter] = {}
    for module in modules:
        for parameter in module.parameters() if module._modules else module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


@contextmanager
def detached_parameters(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Replace the trained parameters of `modules` inside the context by detached parameters that share their memory.

    Gradients with respect to the parameters themselves would run the hooks that users registered on them once for each
    chunk, and once more for the sum.

    Yields:
        The detached parameters, in the order of `trained_parameters`.
    """
    originals = trained_parameters(modules)
    detached = {id(p): nn.Parameter(p.detach()) for p in originals}
    replaced = [
        (inner, name, p)
        for module in modules
        for inner in module.modules()
        for name, p in inner._parameters.items()
        if p is not None and id(p) in detached
    ]
    for inner, name, p in replaced:
        inner._parameters[name] = detached[id(p)]
    try:
        yield [detached[id(p)] for p in originals]
    finally:
        for inner, name, p in replaced:
            inner._parameters[name] = p
