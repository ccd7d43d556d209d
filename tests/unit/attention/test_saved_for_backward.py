"""Layer: one process. What attention saves for backward, activation checkpointing, and torch.compile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mllm_seqpar.attention import decode_attention, lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import Communicator
from mllm_seqpar.masks import FrameMask
from nccl_model import run_nccl_model
from selections import slow_unless

ALGORITHMS = {
    "lv": lambda q, k, v, g: lv_xattn(q, k, v, group=g),
    "ring": lambda q, k, v, g: ring_attention(q, k, v, group=g),
    "causal": lambda q, k, v, g: ring_attention(q, k, v, group=g, causal=True),
    "mesh": lambda q, k, v, g: mesh_attention(q, k, v, group=g, causal=True, layout="contiguous"),
    "ulysses": lambda q, k, v, g: ulysses_attention(q, k, v, group=g, causal=True, layout="striped"),
}


def gradients(comm: Communicator, name: str, checkpointed: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(1, 6, 48, generator=generator, requires_grad=True)
    w = torch.randn(3, 48, 48, generator=torch.Generator().manual_seed(9), requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        q, k, v = (x @ w[i] for i in range(3))
        q, k, v = (t.unflatten(-1, (12, 4)).transpose(1, 2) for t in (q, k, v))
        return x + ALGORITHMS[name](q, k, v, comm).transpose(1, 2).flatten(2)

    y = x
    for _ in range(2):
        y = checkpoint(layer, y, use_reentrant=False) if checkpointed else layer(y)
    y.square().sum().backward()
    return [y.detach(), x.grad, w.grad]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_checkpointing_gives_the_same_bits(name: str, n: int) -> None:
    plain, again = (run_nccl_model(n, gradients, name, checkpointed) for checkpointed in (False, True))
    for a, b in zip(sum(plain, []), sum(again, []), strict=True):
        assert torch.equal(a, b) and a.any()


@pytest.mark.parametrize("checkpointed", [True, False])
def test_checkpointing_frees_keys_and_values(checkpointed: bool) -> None:
    """Any other reference to K and V would keep them alive for every layer."""
    kept: list[weakref.ref[Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        k, v = 2 * x, 3 * x
        kept[:] = [weakref.ref(k.untyped_storage()), weakref.ref(v.untyped_storage())]
        return lv_xattn(x, k, v)

    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    gc.collect()
    assert [ref() is None for ref in kept] == [checkpointed] * 2
    y.sum().backward()
    assert x.grad is not None


def test_saved_tensors_may_be_offloaded() -> None:
    """Hooks such as torch.autograd.graph.save_on_cpu reach every saved tensor."""
    q, k, v = torch.randn(3, 1, 2, 8, 4).requires_grad_().unbind()
    expected = torch.autograd.grad(lv_xattn(q, k, v).sum(), (q, k, v))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy().copy(), torch.from_numpy):
        o = lv_xattn(q, k, v)
    found = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_second_derivative_raises_and_inputs_without_gradients_get_none() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 8, 4))
    (dq,) = torch.autograd.grad(lv_xattn(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    k, v = k.detach(), v.detach()
    assert not lv_xattn(q.detach(), k, v).requires_grad
    lv_xattn(q, k, v).sum().backward()
    assert q.grad is not None and k.grad is None and v.grad is None


MASK = FrameMask.from_dense(torch.ones(1, 6, 3, dtype=torch.bool).tril(), 2)


@pytest.mark.parametrize(
    "attention", slow_unless(lambda fn: fn is decode_attention, [lv_xattn, ulysses_attention, decode_attention])
)
def test_compile_breaks_the_graph_once(attention: Callable[..., Tensor]) -> None:
    calls: list[int] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        calls.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v, mask=MASK) * 3

    wants_grad = attention is not decode_attention
    leaves = [torch.randn(1, heads, 6, 8).requires_grad_(wants_grad) for heads in (4, 2, 2)]
    compiled = torch.compile(layer, backend=keep)
    for _ in range(2):
        found, right = compiled(*leaves), layer(*leaves)
        assert torch.equal(found, right)
        if wants_grad:
            for a, b in zip(*(torch.autograd.grad(o.sum(), leaves) for o in (found, right)), strict=True):
                assert torch.equal(a, b)
    assert calls == [1, 1]
