"""What a recomputation in backward needs of the forward pass: its autocast mode, its random numbers, its parameters.

Two things are recomputed: K and V of visual tokens (`runtime.visual_features`), and MLPs in chunks (`chunked_mlp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from mllm_seqpar.errors import ConfigError


@dataclass(frozen=True)
class AutocastState:
    """The autocast mode of the forward pass, for recomputation in backward."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> AutocastState:
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def again(self) -> AbstractContextManager[object]:
        """Return a context manager that restores this mode."""
        if not self.enabled and not torch.is_autocast_enabled(self.device_type):
            return nullcontext()  # most passes; a context manager of autocast takes as long as a small projection
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


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

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draw what was drawn after this state, inside the context; the generators continue afterwards as before."""
        with torch.random.fork_rng(self.devices, device_type=self.device_type):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states, device_type=self.device_type)
            yield


def trained_parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that require grad, each once, in an order that depends on the modules only.

    `Module.parameters` takes as long as a small projection.
    """
    trained: dict[int, nn.Parameter] = {}
    for module in modules:
        for parameter in module.parameters() if module._modules else module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                trained.setdefault(id(parameter), parameter)
    return list(trained.values())


class ParameterCheck:
    """Finds out whether the parameters of modules have changed since this object was made, in the forward pass.

    Autograd checks the tensors that it saves in the same way. A recomputation with other parameters would return
    gradients of another function.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = self._states()

    def require_unchanged(self, option: str) -> None:
        """Raise ConfigError if a parameter was replaced, modified in place, frozen or unfrozen since.

        `option` is the option of `patch_model` without which nothing is recomputed.
        """
        if self._states() != self._before:
            names = ", ".join(dict.fromkeys(type(module).__name__ for module in self._modules))
            raise ConfigError(
                f"parameters of {names} were replaced, modified, frozen or unfrozen between the forward and the "
                "backward pass, in which these modules are recomputed. Call backward() before an optimizer step, and "
                f"before adapters are switched or disabled. torch.func.functional_call needs {option} in patch_model"
            )

    def _states(self) -> list[tuple[int, int, bool]]:
        states = []
        for module in self._modules:
            for part in module.modules() if module._modules else (module,):  # each layer makes this check
                if not type(part).__module__.startswith(_REPLACES_WEIGHTS):
                    for p in part._parameters.values():
                        if p is not None:
                            states.append((id(p), 0 if p.is_inference() else p._version, p.requires_grad))
        return states


_REPLACES_WEIGHTS = "bitsandbytes."
"""The package of layers that, under FSDP2, replace their frozen 4-bit weight in each call by another object with the
same memory."""


@contextmanager
def detached_parameters(modules: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Replace the trained parameters of `modules` inside the context by detached parameters that share their memory.

    Gradients with respect to the parameters themselves would run the hooks that users registered on them once for each
    chunk, and once more for the sum.

    Yields:
        The detached parameters by the id of the original, in the order of `trained_parameters`.
    """
    detached: dict[int, Tensor] = {id(p): nn.Parameter(p.detach()) for p in trained_parameters(modules)}
    replaced = [
        (inner, name, p)
        for module in modules
        for inner in module.modules()
        for name, p in inner._parameters.items()
        if p is not None and id(p) in detached
    ]
    for inner, name, p in replaced:
        inner._parameters[name] = detached[id(p)]  # type: ignore[assignment]
    try:
        yield detached
    finally:
        for inner, name, p in replaced:
            inner._parameters[name] = p


class GradientSums:
    """Sums over chunks of the gradients of parameters, in float32 or wider; None for one that has no gradient.

    A parameter that nothing computes with has no gradient, as in the unpatched model. Zeros would hide that a gradient
    went elsewhere.
    """

    def __init__(self, count: int) -> None:
        self.totals: list[Tensor | None] = [None] * count

    def add(self, grads: Sequence[Tensor | None], first: int = 0, *, copy: bool = True) -> None:
        """Add the gradients of a chunk, of the parameters from number `first` on.

        With `copy=False`, a gradient of the sum's dtype becomes the sum; nothing else may refer to it.
        """
        for index, grad in enumerate(grads, first):
            total = self.totals[index]
            if grad is None:
                continue
            if total is None:
                self.totals[index] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=copy)
            else:
                total += grad
