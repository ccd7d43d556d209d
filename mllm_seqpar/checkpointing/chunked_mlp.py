"""Blockwise feed-forward (arXiv 2310.01889, section 3): an MLP on some tokens at once, recomputed in backward.

An MLP works token by token. Computed on all of a rank's tokens, its inner activation (intermediate size) is the largest
tensor of a decoder layer, and is kept several times over for the backward pass. Here forward keeps the MLP's input
alone; backward goes through the chunks again, one at a time, and computes each one's inner activation anew.

torch.utils.checkpoint around each chunk would do nearly the same, but autograd would add up the chunks' weight
gradients in the weights' dtype, and a bfloat16 sum of many chunks loses what the single matrix product has. Here they
are added in float32. The results of all chunks are written into one tensor, and nothing is gathered from parts.

Shape legend: N tokens of all samples together, n <= size of them in a chunk, C channels.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from mllm_seqpar.attention.kv_sources import AutocastState
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.patching import Patch

from .recompute import ChunkGradients, RNGState, detached_parameters, flat_tokens, rng_replay, trained_parameters


def chunk_forwards(patch: Patch, modules: Iterable[nn.Module]) -> None:
    """Makes these modules' forwards blockwise, when the configuration has `mlp_chunk_size`.

    Args:
        patch: of the model; undoing it undoes this.
        modules: their forwards take one or more tensors (..., C) of the same tokens and return one (..., C'), each
            token's computed from that token alone.
    """
    size = patch.context.config.mlp_chunk_size
    if size is None:
        return
    for module in modules:
        patch.set(module, "forward", _forward(module, size))


def _forward(module: nn.Module, size: int) -> Any:
    unpatched = module.forward

    @functools.wraps(unpatched)
    def forward(self: nn.Module, *inputs: Tensor) -> Tensor:
        return run_in_chunks(Tokenwise(unpatched, [self], self), size, *inputs)

    return types.MethodType(forward, module)


@dataclass(frozen=True)
class Tokenwise:
    """A computation on tokens.

    Attributes:
        run: tensors (..., C) of the same tokens -> (..., C'), each token's computed from that token alone.
        modules: those that `run` computes with: gradients flow to their parameters.
        whole: the module that `run` is the forward of, or a part of it; it may be sharded by itself (`fully_shard`),
            modules within may not.
    """

    run: Callable[..., Tensor]
    modules: Sequence[nn.Module]
    whole: nn.Module

    @property
    def name(self) -> str:
        """For messages."""
        return type(self.whole).__name__

    def refuse_units(self) -> None:
        """Raises for modules that would be gathered anew for each chunk, on some ranks more often than on others."""
        for module in self.modules:
            for path, part in module.named_modules():
                if part is not self.whole and isinstance(part, FSDPModule):
                    raise ConfigError(
                        f"mlp_chunk_size: {path or type(part).__name__} within {self.name} is sharded "
                        "by itself, so every chunk would gather it; call fully_shard on the decoder layer or the whole "
                        "MLP, or patch with mlp_chunk_size=None"
                    )


def run_in_chunks(what: Tokenwise, size: int, *inputs: Tensor) -> Tensor:
    """``what.run(*inputs)``, `size` tokens at once, with its inner activations recomputed in backward.

    With no more than `size` tokens it is the plain computation; without grad mode, chunks and nothing recomputed.

    Args:
        what: the computation.
        size: tokens of all samples together, at least 1.
        *inputs: (..., C) each, of the same tokens, any floating dtype.

    Returns:
        (..., C').

    Raises:
        ShapeError: inputs of different tokens, or a computation that gives another number of tokens than it got.
        ConfigError: a module within is an FSDP unit; in backward, something that is no parameter wants a gradient.
    """
    shape = inputs[0].shape[:-1]
    if any(x.shape[:-1] != shape for x in inputs):
        raise ShapeError(
            f"blockwise MLP: inputs of shapes {[tuple(x.shape) for x in inputs]} are not of the same tokens"
        )
    what.refuse_units()  # on every rank, also on one whose tokens are few
    if shape.numel() <= size:
        return what.run(*inputs)
    parameters = trained_parameters(what.modules)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *parameters)):
        return _computed(what, size, inputs)
    # Kept by a node of its own, before anything is computed: gradient checkpointing around the layer, which computes
    # until all is there that was kept, then stops short of the MLP when nothing behind it was kept.
    marker = _Keep.apply(torch.empty(0, requires_grad=True), *(x.detach() for x in inputs))
    return _InChunks.apply(what, size, marker.grad_fn, marker, len(inputs), *inputs, *parameters)


class _Keep(torch.autograd.Function):
    """Keeps tensors for another node's backward; its own, which comes after, only makes autograd release them."""

    @staticmethod
    def forward(ctx: Any, marker: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.count = len(inputs)
        return marker.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + ctx.count)


class _InChunks(torch.autograd.Function):
    """Forward: y[c] = f(x[c]) for each chunk c of tokens. Backward: dx[c] = f'(x[c])^T dy[c], dw = sum over c.

    Kept: x, by `_Keep`; the weights are read again from their modules, which FSDP has gathered by then; the random
    state, where f drew numbers. Sums of dw are float32 and exist once, beside one weight's
    dw of one chunk; inner activations are those of one chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, what: Tokenwise, size: int, kept: Any, marker: Tensor, count: int, *tensors: Tensor
    ) -> Tensor:
        ctx.what, ctx.size, ctx.kept, ctx.count = what, size, kept, count
        ctx.autocast, before = AutocastState.current(tensors[0].device.type), RNGState.now(tensors[0])
        with ctx.autocast.again():  # its cache off: a cast of a weight without grad mode must not serve another pass
            out = _computed(what, size, tensors[:count])
        ctx.random = None if before.same(RNGState.now(tensors[0])) else before
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inputs, needed = ctx.kept.saved_tensors, ctx.needs_input_grad[5:]
        with ctx.autocast.again(), rng_replay(ctx.random, grad), detached_parameters(ctx.what.modules) as parameters:
            if len(parameters) != len(needed) - ctx.count:
                raise ConfigError(
                    f"mlp_chunk_size: {len(needed) - ctx.count} parameters of {ctx.what.name} wanted a "
                    f"gradient in the forward pass and {len(parameters)} do in the backward pass; change requires_grad "
                    "between steps"
                )
            sums = ChunkGradients.of(ctx.what.name, inputs, needed[: ctx.count], parameters)
            for rows in _chunks(inputs[0], ctx.size):
                sums.add(ctx.what.run, rows, grad)
        return None, None, None, None, None, *sums.results(needed[ctx.count :])


def _chunks(x: Tensor, size: int) -> Iterator[slice]:
    tokens = x.shape[:-1].numel()
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _computed(what: Tokenwise, size: int, inputs: Sequence[Tensor]) -> Tensor:
    """The whole result, chunk by chunk, in one tensor."""
    flat, out = [flat_tokens(x) for x in inputs], None
    for rows in _chunks(inputs[0], size):
        part = what.run(*(x[..., rows, :] for x in flat))
        if part.shape[:-1] != flat[0][..., rows, :].shape[:-1]:
            raise ShapeError(
                f"blockwise MLP: {what.name} made {tuple(part.shape)} of "
                f"{tuple(flat[0][..., rows, :].shape)}; it must give one row for every token"
            )
        if out is None:
            out = part.new_empty((*flat[0].shape[:-1], part.shape[-1]))
        out[..., rows, :] = part
    assert out is not None
    return out.reshape(*inputs[0].shape[:-1], -1)
