"""Layer: one process, then gloo ranks. Attention inside torch.utils.checkpoint, and what is kept for backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from comm.strict import StrictLoopback
from mllm_seqpar.attention import lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import Communicator, LoopbackCommunicator, as_communicator, run_loopback
from ranks import ranks

ALGORITHMS = {
    "lv": lambda q, k, v, g: lv_xattn(q, k, v, group=g),
    "ring": lambda q, k, v, g: ring_attention(q, k, v, group=g),
    "causal": lambda q, k, v, g: ring_attention(q, k, v, group=g, causal=True),
    "mesh": lambda q, k, v, g: mesh_attention(q, k, v, group=g, causal=True, layout="contiguous"),
    "ulysses": lambda q, k, v, g: ulysses_attention(q, k, v, group=g, causal=True, layout="striped"),
}


def gradients(comm: Communicator, name: str, checkpointed: bool) -> list[Tensor]:
    if isinstance(comm, LoopbackCommunicator):
        comm = StrictLoopback(comm)
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


def over_gloo(rank: int, world: int) -> list[Any]:
    comm = as_communicator(None)
    return [gradients(comm, name, checkpointed) for name in ALGORITHMS for checkpointed in (False, True)]


def assert_same(plain: list[Tensor], checkpointed: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert all(bool(t.any()) for t in plain)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_checkpointing_gives_the_same_bits(name: str, n: int) -> None:
    plain, again = (run_loopback(n, gradients, name, checkpointed) for checkpointed in (False, True))
    for a, b in zip(plain, again, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_checkpointing_frees_keys_and_values(checkpointed: bool) -> None:
    """Whatever else referred to K and V would keep them for every layer, checkpointed or not."""
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
    """torch.autograd.graph.save_on_cpu and the like see every tensor that is kept, and may replace it."""
    q, k, v = torch.randn(3, 1, 2, 8, 4).requires_grad_().unbind()
    expected = torch.autograd.grad(lv_xattn(q, k, v).sum(), (q, k, v))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy().copy(), torch.from_numpy):
        o = lv_xattn(q, k, v)
    found = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 8, 4))
    (dq,) = torch.autograd.grad(lv_xattn(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_nothing_is_computed_backward_for_inputs_without_gradients() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    assert not lv_xattn(q, k, v).requires_grad
    o = lv_xattn(q.requires_grad_(), k, v)
    o.sum().backward()
    assert q.grad is not None and k.grad is None and v.grad is None


@pytest.mark.parametrize("n", [2, 3])
def test_checkpointing_over_gloo(n: int) -> None:
    for results in ranks(n).run(over_gloo):
        for plain, again in zip(results[::2], results[1::2], strict=True):
            assert_same(plain, again)
