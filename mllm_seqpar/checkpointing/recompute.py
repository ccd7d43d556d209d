"""What a module needs to compute the same thing again in backward: random numbers, and leaves to differentiate by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from mllm_seqpar.errors import ConfigError


@dataclass(frozen=True)
class RNGState:
    """Where the generators of the CPU and of one device stand.

    Attributes:
        cpu: the CPU generator's state.
        device_type: "cuda", say.
        devices, states: indices of devices, and the states of theirs; none for the CPU.
    """

    cpu: Tensor
    device_type: str
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def now(cls, x: Tensor) -> RNGState:
        """The present state, of the CPU and the device of x."""
        return cls(torch.get_rng_state(), x.device.type, *get_device_states(x))

    def same(self, other: RNGState) -> bool:
        """Whether nothing was drawn between the two."""
        pairs = zip([self.cpu, *self.states], [other.cpu, *other.states], strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    def restore(self) -> None:
        """Puts the generators there."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states, device_type=self.device_type)


@contextmanager
def rng_replay(before: RNGState | None, x: Tensor) -> Iterator[None]:
    """Inside, the numbers drawn since `before` are drawn again; outside, it is as if nothing was drawn. None: nothing.

    Args:
        before: the state to start from.
        x: a tensor on the device.
    """
    if before is None:
        yield
        return
    now = RNGState.now(x)
    before.restore()
    try:
        yield
    finally:
        now.restore()


def trained_parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The modules' parameters that want a gradient, each once, in an order that depends on the modules only."""
    seen = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(seen.values())


@contextmanager
def detached_parameters(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Inside, the modules compute with stand-ins for their trained parameters: the same memory, other leaves.

    A gradient with respect to a stand-in is only a number to add up. One with respect to the parameter itself would
    run the hooks that users put on it, for each chunk and once more for the sum.

    Yields:
        The stand-ins, in the order of `trained_parameters`.
    """
    own = trained_parameters(modules)
    of = {id(p): nn.Parameter(p.detach()) for p in own}
    places = [
        (part, name, p)
        for module in modules
        for part in module.modules()
        for name, p in part._parameters.items()
        if p is not None and id(p) in of
    ]
    for part, name, p in places:
        part._parameters[name] = of[id(p)]
    try:
        yield [of[id(p)] for p in own]
    finally:
        for part, name, p in places:
            part._parameters[name] = p


def flat_tokens(x: Tensor) -> Tensor:
    """(..., C) -> (1, ..., 1, N, C): a module sees as many dimensions as ever."""
    return x.reshape(*[1] * (x.dim() - 2), -1, x.shape[-1])


@dataclass
class ChunkGradients:
    """Gradients of the inputs, written chunk by chunk, and of the parameters, added up.

    Attributes:
        name: of the module, for messages.
        inputs: (1, ..., N, C) each.
        shapes: theirs as they came.
        of_inputs: the gradient of each, or None where it is not needed.
        parameters: stand-ins of the trained parameters.
        sums: the gradient of each so far, float32 or wider; None: no chunk has used it.
        checked: whether a chunk was looked at for what else it computes with.
    """

    name: str
    inputs: list[Tensor]
    shapes: list[torch.Size]
    of_inputs: list[Tensor | None]
    parameters: list[Tensor]
    sums: list[Tensor | None]
    checked: bool = False

    @classmethod
    def of(
        cls, name: str, inputs: Sequence[Tensor], needed: Sequence[bool], parameters: list[Tensor]
    ) -> ChunkGradients:
        """None of them computed yet."""
        flat = [flat_tokens(x) for x in inputs]
        grads = [torch.zeros_like(x) if need else None for x, need in zip(flat, needed, strict=True)]
        sums: list[Tensor | None] = [None] * len(parameters)
        for index, p in enumerate(parameters):
            p.register_post_accumulate_grad_hook(functools.partial(_add_up, sums, index))
        return cls(name, flat, [x.shape for x in inputs], grads, parameters, sums)

    def add(self, run: Callable[..., Tensor], rows: slice, grad: Tensor) -> None:
        """The chain rule through one chunk, whose inner activations are gone when it returns."""
        parts = [x[..., rows, :].detach() for x in self.inputs]
        for part, d in zip(parts, self.of_inputs, strict=True):
            part.requires_grad_(d is not None)
        with torch.enable_grad():
            out = run(*parts)
        if not out.requires_grad:
            return
        targets = [*(part for part in parts if part.requires_grad), *self.parameters]
        if not self.checked:  # once: all chunks go the same way
            self._refuse_others(out, targets)
            self.checked = True
        torch.autograd.backward(out, flat_tokens(grad)[..., rows, :].to(out.dtype), inputs=targets)
        for part, d in zip(parts, self.of_inputs, strict=True):
            if d is not None and part.grad is not None:
                d[..., rows, :] = part.grad

    def results(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Of inputs and parameters, in their shapes and dtypes."""
        of_inputs = [
            None if d is None else d.reshape(shape) for d, shape in zip(self.of_inputs, self.shapes, strict=True)
        ]
        of_parameters: list[Tensor | None] = []
        for index, (p, need) in enumerate(zip(self.parameters, needed, strict=True)):
            total, self.sums[index] = self.sums[index], None  # one after the other: not all of them in two dtypes
            of_parameters.append(None if total is None or not need else total.to(p.dtype))
        return of_inputs + of_parameters

    def _refuse_others(self, out: Tensor, targets: Sequence[Tensor]) -> None:
        """Raises if `out` depends on something that wants a gradient and would not get it."""
        known, seen, ahead = {id(x) for x in targets}, set(), [out.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise ConfigError(
                    f"mlp_chunk_size: {self.name} computes with a tensor of shape {tuple(leaf.shape)} that "
                    "wants a gradient and is no parameter of it, so that the gradient would be lost; make it a "
                    "parameter of that module, or patch with mlp_chunk_size=None"
                )
            ahead += [before for before, _ in node.next_functions]


def _add_up(sums: list[Tensor | None], index: int, parameter: Tensor) -> None:
    """Moves a chunk's gradient to its sum as soon as it is there, so that one weight's at a time exists beside sums."""
    grad, parameter.grad = parameter.grad, None
    assert grad is not None
    total = sums[index]
    if total is None:
        sums[index] = grad.to(torch.promote_types(grad.dtype, torch.float32))
    else:
        total += grad
