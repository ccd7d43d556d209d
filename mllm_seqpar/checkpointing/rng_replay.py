"""Helpers for modules that are recomputed in backward: RNG replay, checks of parameters, and detached parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from mllm_seqpar.errors import ConfigError


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


class ParameterCheck:
    """Finds out whether the parameters of modules have changed since this object was made, in the forward pass.

    Autograd checks the tensors that it saves in the same way. A recomputation with other parameters would return
    gradients of another function.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = self._found()

    def require_unchanged(self, option: str) -> None:
        """Raise ConfigError if a parameter was replaced, modified in place, frozen or unfrozen since.

        `option` is the option of `patch_model` without which nothing is recomputed.
        """
        if self._found() != self._before:
            names = ", ".join(dict.fromkeys(type(module).__name__ for module in self._modules))
            raise ConfigError(
                f"parameters of {names} were replaced, modified, frozen or unfrozen between the forward and the "
                "backward pass, in which these modules are recomputed. Call backward() before an optimizer step, and "
                f"before adapters are switched or disabled. torch.func.functional_call needs {option} in patch_model"
            )

    def _found(self) -> list[tuple[int, int, bool]]:
        found = []
        for module in self._modules:
            for p in module.parameters() if module._modules else module._parameters.values():
                if p is not None:
                    found.append((id(p), 0 if p.is_inference() else p._version, p.requires_grad))
        return found


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
