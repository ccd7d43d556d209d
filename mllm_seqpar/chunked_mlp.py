"""Blockwise feed-forward (arXiv 2310.01889, section 3): an MLP in chunks of tokens, recomputed in backward.

An MLP computes each token independently. Computed on all tokens of a rank at once, its inner activation (intermediate
size) is the largest tensor of a decoder layer, and autograd saves it several times. Here, forward saves only the MLP's
input; backward recomputes the inner activation of one chunk after the other.

torch.utils.checkpoint around each chunk would do nearly the same, but autograd would sum the weight gradients of all
chunks in the dtype of the weights, and a bfloat16 sum over many chunks loses precision that a single matrix product
keeps. Here they are summed in float32. Forward writes the results of all chunks into one tensor.

Shape legend: N tokens of all samples, n <= size of them in a chunk, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.recomputation import (
    AutocastState,
    GradientSums,
    ParameterCheck,
    RNGState,
    detached_parameters,
    trained_parameters,
)


@dataclass(frozen=True)
class TokenwiseFunction:
    """A function of tokens in which the result of each token depends on that token only.

    Attributes:
        run: takes tensors (..., C) of the same tokens, returns (..., C').
        modules: the modules that `run` computes with. Their parameters receive gradients.
        owner: the module whose forward contains `run`. It may be an FSDP unit; modules within it may not.
    """

    run: Callable[..., Tensor]
    modules: Sequence[nn.Module]
    owner: nn.Module

    def refuse_fsdp_units(self) -> None:
        """Raise ConfigError if a module within the owner is an FSDP unit.

        FSDP would gather its parameters for every chunk, and ranks with fewer chunks would stall the others.
        """
        for module in self.modules:
            for path, inner in module.named_modules():
                if inner is not self.owner and isinstance(inner, FSDPModule):
                    raise ConfigError(
                        f"mlp_chunk_size: {path or type(inner).__name__} within {type(self.owner).__name__} is sharded "
                        "by fully_shard on its own, so every chunk would gather it; call fully_shard on the decoder "
                        "layer or the whole MLP, or patch with mlp_chunk_size=None"
                    )


def run_in_chunks(function: TokenwiseFunction, size: int, *inputs: Tensor) -> Tensor:
    """Return ``function.run(*inputs)``, computed `size` tokens at a time and recomputed in backward.

    At most `size` tokens are computed at once, without recomputation. Without grad mode nothing is recomputed either.

    Args:
        function: the computation.
        size: tokens of all samples together, at least 1.
        *inputs: tensors (..., C) of the same tokens, of any floating dtype.

    Returns:
        (..., C').

    Raises:
        ShapeError: the inputs have different numbers of tokens, or `function` does not return one row per token.
        ConfigError: a module within is an FSDP unit; or, in backward, `function` uses a tensor that requires grad and
            is not a parameter of its modules.
    """
    shape = inputs[0].shape[:-1]
    if any(x.shape[:-1] != shape for x in inputs):
        raise ShapeError(
            f"blockwise MLP: inputs of shapes {[tuple(x.shape) for x in inputs]} are not of the same tokens; all "
            "dimensions except the last must be equal"
        )
    function.refuse_fsdp_units()  # on every rank, also on one with few tokens
    if shape.numel() <= size:
        return function.run(*inputs)
    parameters = trained_parameters(function.modules)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *parameters)):
        return _run_chunks(function, size, inputs)
    # A node of its own saves the inputs before anything is computed. Under gradient checkpointing of the
    # layer, recomputation ends once every saved tensor is restored, so the MLP is not run again unless a later
    # operation saved a tensor.
    marker = _SaveInputs.apply(torch.empty(0, requires_grad=True), *(x.detach() for x in inputs))
    return _ChunkedFunction.apply(function, size, marker.grad_fn, marker, len(inputs), *inputs, *parameters)


class _SaveInputs(torch.autograd.Function):
    """Save tensors for the backward of another node. Backward of this node runs later and lets autograd free them."""

    @staticmethod
    def forward(ctx: Any, marker: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.count = len(inputs)
        return marker.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + ctx.count)


class _ChunkedFunction(torch.autograd.Function):
    """Forward: y[c] = f(x[c]) for each chunk c of tokens. Backward: dx[c] = f'(x[c])^T dy[c], dw = sum over c.

    Saved: x, by `_SaveInputs`, and the RNG state if f draws random numbers. The weights are read from their modules in
    backward; FSDP has gathered them again by then. Memory in backward: the inner activations of one chunk, one float32
    sum per weight, and the gradient of one weight of one chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, function: TokenwiseFunction, size: int, saved: Any, marker: Tensor, count: int, *tensors: Tensor
    ) -> Tensor:
        ctx.function, ctx.size, ctx.saved, ctx.count = function, size, saved, count
        ctx.parameters = ParameterCheck(function.modules)
        ctx.autocast, before = AutocastState.current(tensors[0].device.type), RNGState.current(tensors[0])
        # Without autocast's cache of casts: a cast made without grad mode must not serve a later pass.
        with ctx.autocast.again():
            out = _run_chunks(function, size, tensors[:count])
        ctx.rng_state = None if before.equals(RNGState.current(tensors[0])) else before
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        function, needs_grad = ctx.function, ctx.needs_input_grad[5:]
        ctx.parameters.require_unchanged("mlp_chunk_size=None")
        replay = nullcontext() if ctx.rng_state is None else ctx.rng_state.replay()
        with ctx.autocast.again(), replay, detached_parameters(function.modules) as detached:
            saved, parameters = ctx.saved.saved_tensors, list(detached.values())
            inputs, sums = [_flat_tokens(x) for x in saved], GradientSums(len(parameters))
            d_inputs = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needs_grad, strict=False)]

            def add_to_sum(index: int, parameter: Tensor) -> None:
                """Add a chunk's gradient to its sum as soon as it exists, so that only one weight has two of them."""
                grad, parameter.grad = parameter.grad, None
                sums.add([grad], index, copy=False)

            for index, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(functools.partial(add_to_sum, index))
            for tokens in _chunks(grad, ctx.size):
                _backward_of_chunk(function, tokens, inputs, d_inputs, parameters, grad)
        of_inputs = [None if d is None else d.reshape(x.shape) for d, x in zip(d_inputs, saved, strict=True)]
        of_parameters: list[Tensor | None] = []
        for index, (parameter, needed) in enumerate(zip(parameters, needs_grad[ctx.count :], strict=True)):
            # Free each float32 sum before the next one is converted, so that not all exist in two dtypes.
            total, sums.totals[index] = sums.totals[index], None
            of_parameters.append(None if total is None or not needed else total.to(parameter.dtype))
        return None, None, None, None, None, *of_inputs, *of_parameters


def _backward_of_chunk(
    function: TokenwiseFunction,
    tokens: slice,
    inputs: Sequence[Tensor],
    d_inputs: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    grad: Tensor,
) -> None:
    """Apply the chain rule through one chunk. Its inner activations are freed on return."""
    chunk = [x[..., tokens, :].detach().requires_grad_(d is not None) for x, d in zip(inputs, d_inputs, strict=True)]
    with torch.enable_grad():
        out = function.run(*chunk)
    if not out.requires_grad:
        return
    leaves = [*[x for x in chunk if x.requires_grad], *parameters]
    if tokens.start == 0:  # once, since all chunks compute the same
        _refuse_other_leaves(function, out, leaves)
    torch.autograd.backward(out, _flat_tokens(grad)[..., tokens, :].to(out.dtype), inputs=leaves)
    for x, d in zip(chunk, d_inputs, strict=True):
        if d is not None and x.grad is not None:
            d[..., tokens, :] = x.grad


def _refuse_other_leaves(function: TokenwiseFunction, out: Tensor, leaves: Sequence[Tensor]) -> None:
    known, visited, nodes = {id(x) for x in leaves}, set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ConfigError(
                f"mlp_chunk_size: {type(function.owner).__name__} computes with a tensor of shape {tuple(leaf.shape)} "
                "that requires grad and is not one of its parameters, so its gradient would be lost; make it a "
                "parameter of that module, or patch with mlp_chunk_size=None"
            )
        nodes += [before for before, _ in node.next_functions]


def _flat_tokens(x: Tensor) -> Tensor:
    """(..., C) -> (1, ..., 1, N, C). The number of dimensions stays, because a module may depend on it."""
    return x.reshape(*[1] * (x.dim() - 2), -1, x.shape[-1])


def _chunks(x: Tensor, size: int) -> Iterator[slice]:
    tokens = x.shape[:-1].numel()
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _run_chunks(function: TokenwiseFunction, size: int, inputs: Sequence[Tensor]) -> Tensor:
    flat, out = [_flat_tokens(x) for x in inputs], None
    for tokens in _chunks(inputs[0], size):
        chunk = [x[..., tokens, :] for x in flat]
        result = function.run(*chunk)
        if result.shape[:-1] != chunk[0].shape[:-1]:
            raise ShapeError(
                f"blockwise MLP: {type(function.owner).__name__} made {tuple(result.shape)} of "
                f"{tuple(chunk[0].shape)}; it must give one row for every token"
            )
        if out is None:
            out = result.new_empty((*flat[0].shape[:-1], result.shape[-1]))
        out[..., tokens, :] = result
    assert out is not None
    return out.reshape(*inputs[0].shape[:-1], -1)
