"""Layer: one process. What a decoder layer keeps for backward, and the largest tensors that it ever makes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from mllm_seqpar import SeqParConfig
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.context import SeqParContext

WIDTH, TOKENS, SIZE = 16, 40, 8


class Layer(nn.Module):
    """A decoder layer of LLaMA on 2 samples, with its MLP in chunks."""

    def __init__(self, inner: int, size: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(hidden_size=WIDTH, intermediate_size=inner, num_attention_heads=2, num_key_value_heads=2)
        config._attn_implementation = "sdpa"
        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
        context = SeqParContext(as_communicator(None), SeqParConfig(mlp_chunk_size=size))
        Patch("test", context).chunk_forwards([self.layer.mlp])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, position_embeddings=self.rotary(x, torch.arange(x.shape[1])[None]))


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """Inside, collects the bytes of each storage that autograd keeps, by address; parameters too."""
    found: dict[int, int] = {}
    alive: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        alive.append(x)  # or another one may get its address
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        yield found


def bytes_kept(inner: int, size: int | None) -> int:
    """By a layer for its backward pass, without weights."""
    layer, x = Layer(inner, size), torch.randn(2, TOKENS // 2, WIDTH).requires_grad_()
    with kept() as found:
        y = layer(x)
    del y
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    return sum(count for address, count in found.items() if address not in weights)


class Largest(TorchDispatchMode):
    """Follows tensors of which a dimension has `size`, those of `weights` left out.

    Attributes:
        rows: the most rows that any of them had.
        peak: the most bytes of all of them together.
    """

    def __init__(self, size: int, weights: nn.Module) -> None:
        super().__init__()
        self.size, self.rows, self.live, self.peak = size, 0, 0, 0
        self._known = {p.untyped_storage().data_ptr() for p in weights.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and self.size in x.shape:
                self._follow(x)
        return out

    def _follow(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, count = storage.data_ptr(), storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.live += count
        self.rows, self.peak = max(self.rows, x.numel() // self.size), max(self.peak, self.live)

        def gone() -> None:
            self._known.discard(address)
            self.live -= count

        weakref.finalize(storage, gone)


def test_what_is_kept_does_not_depend_on_the_inner_size() -> None:
    small, large = bytes_kept(24, SIZE), bytes_kept(240, SIZE)
    assert small == large
    # unpatched: gate, its activation, up, and their product
    assert bytes_kept(240, None) == large + 4 * TOKENS * 240 * 4


def inner_activations(inner: int, size: int | None) -> Largest:
    """Of a pass and its backward; weights get no gradients here, which have the inner size too."""
    layer, x = Layer(inner, size).requires_grad_(False), torch.randn(2, TOKENS // 2, WIDTH).requires_grad_()
    with Largest(inner, layer) as found:
        layer(x).sum().backward()
    return found


@pytest.mark.parametrize("size", [1, SIZE, 13])
def test_no_inner_activation_of_more_tokens_is_ever_made(size: int) -> None:
    plain, chunked = inner_activations(48, None), inner_activations(48, size)
    assert (plain.rows, chunked.rows) == (TOKENS, size)
    # gate, up, their activation and product, and gradients of two of them
    assert plain.peak == 6 * TOKENS * 48 * 4
    assert chunked.peak == 6 * size * 48 * 4


def test_gradients_of_weights_exist_once_and_one_weights_twice() -> None:
    """The sums, and one chunk's gradient of one weight; not one for each chunk."""
    layer, x = Layer(512, 2), torch.randn(2, TOKENS // 2, WIDTH).requires_grad_()
    y = layer(x).sum()
    with Largest(512, layer) as found:
        y.backward()
    weight = 512 * WIDTH * 4
    assert 4 * weight <= found.peak < 4.8 * weight


@pytest.mark.parametrize("size", [None, SIZE])
def test_the_input_is_released_by_backward(size: int | None) -> None:
    """Though the loss lives on, as it does in training loops."""
    mlp, x = Layer(24, size).layer.mlp, torch.randn(1, TOKENS, WIDTH, requires_grad=True) * 1.0
    storage = weakref.ref(x.untyped_storage())
    loss = mlp(x).sum()
    del x
    gc.collect()
    assert storage() is not None
    loss.backward()
    gc.collect()
    assert storage() is None and loss.grad_fn is not None
