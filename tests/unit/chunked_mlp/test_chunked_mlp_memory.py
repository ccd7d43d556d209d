"""Layer: one process. What a decoder layer with a chunked MLP saves for backward, and the memory that it uses."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from memory_meters import Peak, saved
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
    return saved(lambda: layer(x), *layer.parameters())


def test_saved_bytes_do_not_depend_on_the_inner_size() -> None:
    small, large = saved_bytes(24, SIZE), saved_bytes(240, SIZE)
    assert small == large
    # unpatched: gate, its activation, up, and their product
    assert saved_bytes(240, None) == large + 4 * TOKENS * 240 * 4


def inner_activations(inner: int, size: int | None) -> Peak:
    """Track forward and backward. The weights are frozen, because their gradients have the inner size too."""
    layer, x = Layer(inner, size).requires_grad_(False), torch.randn(2, TOKENS // 2, WIDTH).requires_grad_()
    with Peak(*layer.parameters(), size=inner) as found:
        layer(x).sum().backward()
    return found


@pytest.mark.parametrize("size", [1, SIZE, 13])
def test_inner_activations_of_one_chunk_exist_at_a_time(size: int) -> None:
    plain, chunked = inner_activations(48, None), inner_activations(48, size)
    assert (plain.largest, chunked.largest) == (TOKENS * 48 * 4, size * 48 * 4)
    # gate, up, their activation and product, and gradients of two of them
    assert plain.bytes == 6 * TOKENS * 48 * 4
    assert chunked.bytes == 6 * size * 48 * 4


def test_only_one_chunk_gradient_exists_in_addition_to_sums() -> None:
    layer, x = Layer(512, 2), torch.randn(2, TOKENS // 2, WIDTH).requires_grad_()
    y = layer(x).sum()
    with Peak(*layer.parameters(), size=512) as found:
        y.backward()
    weight = 512 * WIDTH * 4
    assert 4 * weight <= found.bytes < 4.8 * weight


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
