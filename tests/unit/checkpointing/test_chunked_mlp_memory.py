"""Layer: one process. What a decoder layer with a chunked MLP saves for backward, and the memory that it uses."""

import gc
import weakref
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


def saved_bytes(inner: int, size: int | None) -> int:
    """Return the bytes that autograd saves for the layer's backward pass, without weights."""
    layer, x = Layer(inner, size), torch.randn(2, TOKENS // 2, WIDTH).requires_grad_()
    found: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        alive.append(x)  # otherwise another tensor may have its address
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = layer(x)
    del y
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    return sum(count for address, count in found.items() if address not in weights)


def test_saved_bytes_do_not_depend_on_the_inner_size() -> None:
    small, large = saved_bytes(24, SIZE), saved_bytes(240, SIZE)
    assert small == large
    # unpatched: gate, its activation, up, and their product
    assert saved_bytes(240, None) == large + 4 * TOKENS * 240 * 4


class MemoryTracker(TorchDispatchMode):
    """Tracks the tensors that have a dimension of `size`, without the weights: the most `rows` and `peak` bytes."""

    def __init__(self, size: int, weights: nn.Module) -> None:
        super().__init__()
        self.size, self.rows, self.live, self.peak = size, 0, 0, 0
        self._known = {p.untyped_storage().data_ptr() for p in weights.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and self.size in x.shape:
                self._track(x)
        return out

    def _track(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, count = storage.data_ptr(), storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.live += count
        self.rows, self.peak = max(self.rows, x.numel() // self.size), max(self.peak, self.live)
        weakref.finalize(storage, self._free, address, count)

    def _free(self, address: int, count: int) -> None:
        self._known.discard(address)
        self.live -= count


def inner_activations(inner: int, size: int | None) -> MemoryTracker:
    """Track forward and backward. The weights are frozen, because their gradients have the inner size too."""
    layer, x = Layer(inner, size).requires_grad_(False), torch.randn(2, TOKENS // 2, WIDTH).requires_grad_()
    with MemoryTracker(inner, layer) as found:
        layer(x).sum().backward()
    return found


@pytest.mark.parametrize("size", [1, SIZE, 13])
def test_inner_activations_of_one_chunk_exist_at_a_time(size: int) -> None:
    plain, chunked = inner_activations(48, None), inner_activations(48, size)
    assert (plain.rows, chunked.rows) == (TOKENS, size)
    # gate, up, their activation and product, and gradients of two of them
    assert plain.peak == 6 * TOKENS * 48 * 4
    assert chunked.peak == 6 * size * 48 * 4


def test_only_one_chunk_gradient_exists_in_addition_to_sums() -> None:
    layer, x = Layer(512, 2), torch.randn(2, TOKENS // 2, WIDTH).requires_grad_()
    y = layer(x).sum()
    with MemoryTracker(512, layer) as found:
        y.backward()
    weight = 512 * WIDTH * 4
    assert 4 * weight <= found.peak < 4.8 * weight


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, SIZE])
def test_backward_frees_the_input(size: int | None) -> None:
    """The loss stays alive, as in training loops."""
    mlp, x = Layer(24, size).layer.mlp, torch.randn(1, TOKENS, WIDTH, requires_grad=True) * 1.0
    storage = weakref.ref(x.untyped_storage())
    loss = mlp(x).sum()
    del x
    gc.collect()
    assert storage() is not None
    loss.backward()
    gc.collect()
    assert storage() is None and loss.grad_fn is not None
