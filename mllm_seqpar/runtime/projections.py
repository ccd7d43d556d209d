"""How layers project K and V from visual features, and the gradients of that projection.

Most projections consist of norms, linear layers and a rotation. `KVProjection` describes such a projection, and
computes its gradients for a chunk of frames without repeating the matrix multiplications of its forward pass:

    x = input_norm(y);  raw k, v = x W^T + b;  k = rotate(key_norm(raw k))
    d raw k = key_norm'(rotate^T dk);  dW = [d raw k, dv]^T x;  db = sum of [d raw k, dv];  dx = [d raw k, dv] W

where x is recomputed, which is an element-wise computation, and raw k is kept from the projection of the same backward
pass if there is a key_norm. If K is rotated before its norm, k = key_norm(rotate(raw k)), rotate(raw k) is kept. Norms
are differentiated by autograd. Every other projection, among them one with adapters or quantised weights, is
differentiated by autograd as a whole (`autograd_grads`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mllm_seqpar._compat import global_module_hooks
from mllm_seqpar.attention.keys import attention_dtype
from mllm_seqpar.recomputation import detached_parameters, trained_parameters

ProjectFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(features (f, tokens, width), index (f, ...)) -> k, v (1, G, f * tokens, D), frame by frame."""

Grads = tuple[Tensor | None, list[Tensor | None]]
"""Gradients of a chunk of features and of the trained parameters; None where there is none."""


class Projection(Protocol):
    """How a layer projects K and V from features: a `KVProjection`, or a `FunctionProjection`.

    It treats frames independently of each other, because it is called for chunks of frames, and gives the same result
    when backward calls it again.
    """

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Everything that the projection uses, so that the parameters receive gradients."""

    def __call__(self, features: Tensor, index: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, f * tokens, D) of features (f, tokens, width) and index (f, ...), frame by frame."""


@dataclass(frozen=True)
class FunctionProjection:
    """A `Projection` by any function, which autograd differentiates.

    Attributes:
        function: (features (f, tokens, width), index (f, ...)) -> k, v (1, G, f * tokens, D), as in `Projection`.
        modules: the modules that it uses.
    """

    function: ProjectFunction
    modules: Sequence[nn.Module]

    def __call__(self, features: Tensor, index: Tensor, /) -> tuple[Tensor, Tensor]:
        return self.function(features, index)


@dataclass(frozen=True)
class KVProjection:
    """A `Projection` that is made of linear layers, and optionally of norms and a rotation.

    The modules are called, so that their hooks, adapters and quantised weights take part.

    Attributes:
        linears: the linear layers of K and of V, or one for both.
        head_dim: D.
        interleaved: whether the output channels of one linear layer for both are (KV head, {K, V}, D). They are
            ({K, V}, KV head, D) otherwise.
        input_norm: applied to the features before the linear layers.
        key_norm: applied to each head of K after its linear layer.
        rotate: (k (f, tokens, G, D), index (f, ...), transposed) -> k of the same shape and dtype. It is linear in k,
            and returns its transpose (the inverse of a rotation) if `transposed` is true.
        rotates_first: whether K is rotated before its norm, and not after it.
    """

    linears: tuple[nn.Module, ...]
    head_dim: int
    interleaved: bool = False
    input_norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    rotate: Callable[[Tensor, Tensor, bool], Tensor] | None = None
    rotates_first: bool = False

    @functools.cached_property
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose parameters the projection uses."""
        before = () if self.input_norm is None else (self.input_norm,)
        return [*before, *self.linears] if self.key_norm is None else [*before, *self.linears, self.key_norm]

    def __call__(self, features: Tensor, index: Tensor, raw_keys: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, f * tokens, D) of features (f, tokens, width) and index (f, ...), frame by frame.

        K before its norm, (f, tokens, G, D), is appended to `raw_keys`.
        """
        x = self._as_input(features)
        x = x if self.input_norm is None else self.input_norm(x)
        k, v = self._split([linear(x) for linear in self.linears])
        if self.rotate is not None and self.rotates_first:
            k = self.rotate(k, index, False)
        if raw_keys is not None:
            raw_keys.append(k.contiguous())  # not a view that keeps V alive
        if self.key_norm is not None:
            k = self.key_norm(k)
        if self.rotate is not None and not self.rotates_first:
            k = self.rotate(k, index, False)
        v = v.flatten(0, 1).transpose(0, 1)[None]
        if len(self.linears) == 1 and (self.key_norm is not None or self.rotate is not None):
            v = v.contiguous()  # a view would keep the unmodified K, which shares its storage, alive
        return k.flatten(0, 1).transpose(0, 1)[None], v

    def has_direct_grads(self, trained: Sequence[Tensor]) -> bool:
        """Return whether `direct_grads` computes the gradients of the parameters `trained`: whether every linear layer
        is exactly torch's with ordinary weights, and every parameter belongs to the modules; none has hooks."""
        known = {id(parameter) for parameter in trained_parameters(self.modules)}
        plain = all(_is_plain_linear(linear) for linear in self.linears) and not _has_foreign_global_hook()
        return plain and not _have_hooks(trained) and all(id(parameter) in known for parameter in trained)

    def direct_grads(
        self,
        features: Tensor,
        index: Tensor,
        dk: Tensor,
        dv: Tensor,
        needs_features: bool,
        trained: Sequence[Tensor],
        raw_keys: Tensor | None = None,
    ) -> Grads:
        """Return the gradients of features (f, tokens, width) and of the parameters `trained`, without repeating the
        matrix multiplications of the forward pass.

        Args:
            features, index: those of f frames.
            dk, dv: (1, G, f * tokens, D), the gradients of k and v, in any dtype.
            needs_features: whether the gradient of the features is returned; it has their dtype.
            trained: the parameters whose gradients are returned.
            raw_keys: (f, tokens, G, D), what the projection of this chunk stored, if there is a `key_norm`.
        """
        of_input, of_key = (_parameters_in(norm, trained) for norm in (self.input_norm, self.key_norm))
        grads: dict[int, Tensor] = {}
        needs_x = needs_features or bool(of_input)
        y = self._as_input(features.detach()).requires_grad_(needs_features)
        with torch.enable_grad():
            x = y if self.input_norm is None else self.input_norm(_inner(y))
        dk, dv = (g[0].transpose(0, 1).unflatten(0, features.shape[:2]) for g in (dk, dv))  # (f, tokens, G, D)
        if self.rotate is not None and not self.rotates_first:
            dk = self.rotate(dk, index, True)
        if self.key_norm is not None:
            assert raw_keys is not None
            raw = raw_keys.detach().requires_grad_()
            with torch.enable_grad():
                k = self.key_norm(_inner(raw))
            dk, *grads_of_norm = torch.autograd.grad(k, [raw, *of_key], dk.to(k.dtype).contiguous(), allow_unused=True)
            _add(grads, of_key, grads_of_norm)
        if self.rotate is not None and self.rotates_first:
            dk = self.rotate(dk, index, True)
        dx = self._linear_grads(x.detach().flatten(0, 1), self._join(dk, dv), needs_x, trained, grads)
        d_features = None
        if dx is not None:
            dx = dx.view_as(x)
            if self.input_norm is None:
                d_features = dx.to(features.dtype)
            else:
                targets = ([y] if needs_features else []) + of_input
                grads_of_norm = list(torch.autograd.grad(x, targets, dx.to(x.dtype), allow_unused=True))
                d_features = grads_of_norm.pop(0) if needs_features else None
                d_features = None if d_features is None else d_features.to(features.dtype)
                _add(grads, of_input, grads_of_norm)
        return d_features, [grads.get(id(parameter)) for parameter in trained]

    def _linear_grads(
        self, x: Tensor, outputs: list[Tensor], needs_x: bool, trained: Sequence[Tensor], grads: dict[int, Tensor]
    ) -> Tensor | None:
        """Add the gradients of weights and biases to `grads`, and return that of x (rows, width) if it is needed.

        `outputs` has the gradient (rows, channels) of each linear layer's output. Products are computed in the dtype of
        the forward pass: autocast casts the operands of `mm` and `addmm` as it does those of `linear`.
        """
        ids = {id(parameter) for parameter in trained}
        dx: Tensor | None = None
        for linear, g in zip(self.linears, outputs, strict=True):
            weight, bias = linear.weight, linear.bias
            assert isinstance(weight, Tensor)
            if id(weight) in ids:
                _add(grads, [weight], [torch.mm(g.t(), x)])
            if isinstance(bias, Tensor) and id(bias) in ids:
                _add(grads, [bias], [g.sum(0, dtype=torch.promote_types(g.dtype, torch.float32))])
            if needs_x:
                dx = torch.mm(g, weight) if dx is None else torch.addmm(dx, g, weight)
        return dx

    def _as_input(self, features: Tensor) -> Tensor:
        """Return the features in the dtype of the linear layers' weights, unless autocast or the layers cast them.

        FSDP2's mixed precision gathers the weights of a decoder layer in another dtype than that of the features. It
        casts the arguments of the layer too, but not the features, which are in the state of the pass.
        """
        weight = getattr(self.linears[0], "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.element_size() < 2:  # quantised
            return features
        return features if torch.is_autocast_enabled(features.device.type) else features.to(weight.dtype)

    def _split(self, outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return k and v (f, tokens, G, D) from the outputs (f, tokens, channels) of the linear layers."""
        if len(outputs) == 1 and self.interleaved:
            k, v = outputs[0].unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
            return k, v
        k, v = outputs[0].chunk(2, dim=-1) if len(outputs) == 1 else outputs
        return k.unflatten(-1, (-1, self.head_dim)), v.unflatten(-1, (-1, self.head_dim))

    def _join(self, dk: Tensor, dv: Tensor) -> list[Tensor]:
        """Return the gradients (rows, channels) of the linear layers' outputs, given those of the results of `_split`.

        They are in the dtype of the outputs.
        """
        gradients = [g.flatten(0, 1) for g in (dk, dv)]
        dtypes = [attention_dtype(linear.weight) for linear in self.linears]  # type: ignore[arg-type]
        if len(dtypes) == 1:
            both = [g.to(dtypes[0]) for g in gradients]
            return [torch.stack(both, dim=-2 if self.interleaved else -3).flatten(1)]
        contiguous = torch.contiguous_format
        return [g.to(x, memory_format=contiguous).flatten(1) for g, x in zip(gradients, dtypes, strict=True)]


def autograd_grads(
    project: Projection,
    features: Tensor,
    index: Tensor,
    dk: Tensor,
    dv: Tensor,
    needs_features: bool,
    trained: Sequence[Tensor],
    dtype: torch.dtype,
) -> Grads:
    """Return what `KVProjection.direct_grads` does, by differentiating `project`, the result of which is cast to
    `dtype`.

    Hooks that users registered on a parameter run when autograd gets the result, and not here.
    """
    detached = detached_parameters(project.modules) if _have_hooks(trained) else nullcontext(dict[int, Tensor]())
    with torch.enable_grad(), detached as replaced:
        part = features.detach().requires_grad_(needs_features)
        k, v = (x.to(dtype) for x in project(_inner(part), index))
    outputs = [(x, g.to(x.dtype)) for x, g in ((k, dk), (v, dv)) if x.requires_grad]
    if not outputs:
        return None, [None] * len(trained)
    targets = [*([part] if needs_features else []), *(replaced.get(id(p), p) for p in trained)]
    found = torch.autograd.grad([x for x, _ in outputs], targets, [g for _, g in outputs], allow_unused=True)
    grads: list[Tensor | None] = list(found)
    return grads.pop(0) if needs_features else None, grads


def _inner(leaf: Tensor) -> Tensor:
    """Return the tensor as the result of an operation: the hooks of torch's FLOP counter do not accept leaf tensors."""
    return leaf.view_as(leaf)


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a call of the module is `torch.nn.functional.linear` with ordinary tensors, and nothing else.

    Adapters, quantised layers and parametrizations are other classes; sharded and quantised weights are tensors of
    other classes. FSDP gathers a sharded weight before backward reads it here.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    tensors = (module.weight, module.bias)
    return not any(hooks) and all(x is None or type(x) in (Tensor, nn.Parameter) for x in tensors)


def _has_foreign_global_hook() -> bool:
    """Return whether every module calls a hook of another library. Those of torch (its FLOP counter) only observe."""
    owners = (type(getattr(hook, "__self__", None)) for hook in global_module_hooks())
    return any(not owner.__module__.startswith("torch.") for owner in owners)


def _have_hooks(parameters: Sequence[Tensor]) -> bool:
    return any(parameter._backward_hooks for parameter in parameters)


def _parameters_in(module: nn.Module | None, trained: Sequence[Tensor]) -> list[Tensor]:
    """Return those of `trained` that are parameters of the module."""
    own = set() if module is None else {id(parameter) for parameter in trained_parameters([module])}
    return [parameter for parameter in trained if id(parameter) in own]


def _add(grads: dict[int, Tensor], parameters: Sequence[Tensor], added: Sequence[Tensor | None]) -> None:
    """Add gradients to those of the same parameters: modules may share one."""
    for parameter, grad in zip(parameters, added, strict=True):
        if grad is not None:
            before = grads.get(id(parameter))
            grads[id(parameter)] = grad if before is None else before + grad
