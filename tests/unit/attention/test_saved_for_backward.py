"""Layer: one process. What attention saves for backward, activation checkpointing, and torch.compile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mllm_seqpar.attention import decode_attention, lv_xattn, ulysses_attention
from mllm_seqpar.masks import FrameMask
from selections import slow_unless


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
