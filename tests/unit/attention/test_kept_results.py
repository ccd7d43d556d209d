"""Layer: one process. In checkpointed regions, attention runs once and gradients have the same bits.

`off` computes attention again in the recomputation, as before; both must give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

from mllm_seqpar.attention import (
    attend,
    head_layout,
    kept_results,
    lv_xattn,
    mesh_attention,
    ring_attention,
    ulysses_attention,
)
from mllm_seqpar.comm import Communicator
from nccl_model import run_nccl_model

ROWS, WIDTH, HEADS = 6, 48, 12
SHAPE = (1, HEADS, ROWS, WIDTH // HEADS)
Layer = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The distributed forward passes that ran, on all ranks."""
    ran: list[str] = []

    def counted(forward: Callable[..., Any], *args: Any) -> Any:
        ran.append(forward.__name__)
        return forward(*args)

    monkeypatch.setattr(attend, "distributed_forward", functools.partial(counted, attend.distributed_forward))
    return ran


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    @contextlib.contextmanager
    def turned_off() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for module in (attend, head_layout):
                patch.setattr(module, "running_region", lambda: None)
            yield

    yield turned_off


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attention(x: Tensor, w: Tensor, function: Callable[..., Tensor] = lv_xattn, **options: Any) -> Tensor:
    """Return self-attention with projections that save tensors before and after it."""
    o = function(*(heads(x @ w[i]) for i in range(3)), **options)
    return o.transpose(1, 2).flatten(2)


def layer(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    return x + (attention(x.sin(), w, **options) @ w[3]).tanh()


def leaves(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return x (1, ROWS, WIDTH) of this seed and w (4, WIDTH, WIDTH), the same for all seeds."""
    x = torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    w = torch.randn(4, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) * WIDTH**-0.5
    return x.requires_grad_(), w.requires_grad_()


def gradients(run: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Return the result of `run` and its gradients."""
    x, w = leaves()
    torch.manual_seed(3)
    y = run(x, w)
    y.square().sum().backward()
    assert x.grad is not None and w.grad is not None and x.grad.any()
    return [y.detach(), x.grad, w.grad]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def again(function: Layer, **options: Any) -> Layer:
    return lambda x, w: checkpoint(function, x, w, use_reentrant=False, **options)


def twice(function: Layer) -> Layer:
    return lambda x, w: function(function(x, w), w)


def penalised(x: Tensor, w: Tensor) -> Tensor:
    """A recomputation may start in the forward pass, and again in the backward pass."""
    y = layer(x, w)
    (inside,) = torch.autograd.grad(y.square().sum(), y if y.is_leaf else x, retain_graph=True)
    return layer(y * inside.detach(), w)


def with_frozen(x: Tensor, w: Tensor) -> Tensor:
    return layer(x + attention(x.detach(), w.detach()), w)


def offloaded(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        y = layer(x, w)
    return y * x


def partly_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    """The kernel changes products in place through aliases."""
    with torch.no_grad():
        y = attention(x, w, kernel="blocked_matmul")
    return layer(x + y, w, kernel="blocked_matmul")


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    stored = op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.sin.default)
    return CheckpointPolicy.MUST_SAVE if stored else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)
REGIONS: dict[str, tuple[Layer, Layer, int]] = {
    "one layer twice in a region, the region twice": (twice(twice(layer)), twice(again(twice(layer))), 4),
    "gradients inside a region": (penalised, again(penalised), 2),
    # the recomputation of the outer region runs the first inner one from the start
    "nested regions": (twice(layer), again(twice(again(layer))), 2 + 1),
    "calls without gradients, which are repeated": (with_frozen, again(with_frozen), 2 + 1),
    # which counts the operators outside attention
    "selective checkpointing": (twice(layer), twice(again(layer, context_fn=SELECTIVE)), 2 * 2),
    "selective checkpointing, partly without gradients": (
        partly_without_gradients,
        again(partly_without_gradients, context_fn=SELECTIVE),
        2 * 2,
    ),
    "hooks inside a region": (offloaded, again(offloaded), 2),
}
"""What is computed, the same in checkpointed regions, and how many distributed forward passes these run."""


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_regions_compute_attention_once_where_they_can(name: str, early_stop: bool, calls: list[str]) -> None:
    plain, checkpointed, count = REGIONS[name]
    expected = gradients(plain)
    del calls[:]
    with set_checkpoint_early_stop(early_stop):
        assert_same(gradients(checkpointed), expected)
    assert len(calls) == count or not early_stop


class _Cached(_CachedTorchDispatchMode):
    """A subclass elsewhere, as xformers has one."""


def test_only_selective_checkpointing_is_hidden() -> None:
    caching, _ = create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    flops, fake = FlopCounterMode(display=False), FakeTensorMode()
    with fake, flops, caching, _Cached(None, {}):
        modes = _get_current_dispatch_mode_stack()
        with pytest.raises(KeyError), kept_results.without_stored_operators():
            assert _get_current_dispatch_mode_stack() == [fake, modes[1]]
            assert isinstance(torch.ones(2, 3) @ torch.ones(3, 4), FakeTensor)
            raise KeyError
        assert _get_current_dispatch_mode_stack() == modes and len(modes) == 4
    assert flops.get_total_flops() == 2 * 2 * 3 * 4


def test_several_forwards_before_a_backward_find_their_own_results(calls: list[str]) -> None:
    def run(function: Layer) -> list[Tensor]:
        inputs = [leaves(seed)[0] for seed in range(3)]
        w = leaves()[1]
        losses = [function(x, w).square().sum() for x in inputs]
        (losses[0] + 2 * losses[2]).backward()
        losses[1].backward()
        return [w.grad, *(x.grad for x in inputs)]

    expected = run(twice(layer))
    assert_same(run(twice(again(layer))), expected)
    assert len(calls) == 2 * 6


def test_second_backward_hands_back_the_same_results(calls: list[str]) -> None:
    def run(function: Layer) -> list[Tensor]:
        x, w = leaves()
        loss = function(x, w).square().sum()
        loss.backward(retain_graph=True)
        first = w.grad.clone()
        loss.backward()
        return [first, w.grad, x.grad]

    expected = run(twice(layer))
    assert_same(run(twice(again(layer))), expected)
    assert len(calls) == 4


def live_results() -> int:
    return sum(type(x) is Tensor and x.shape == SHAPE for x in gc.get_objects())


def test_nothing_outlives_the_graph() -> None:
    """Abandoned forward passes, exceptions in forward and in recomputation, and finished steps free the results."""
    x, w = leaves()
    fails = [True]

    def failing(x: Tensor, w: Tensor) -> Tensor:
        y = layer(x, w)
        if fails[0]:
            raise FloatingPointError
        return y.exp()

    gc.collect()
    before = live_results()
    gc.disable()  # no reference cycle may wait for the garbage collector
    try:
        y = twice(again(layer))(x, w)
        assert live_results() >= before + 2
        del y
        assert live_results() == before
        gradients(twice(again(layer)))
        assert live_results() == before
        with pytest.raises(FloatingPointError):
            again(failing)(x, w)
        fails[0] = False
        y = again(failing)(x, w)
        fails[0] = True
        with pytest.raises(FloatingPointError):
            y.sum().backward(retain_graph=True)
        fails[0] = False
        y.sum().backward()
        del y
        assert live_results() == before
    finally:
        gc.enable()


def test_results_changed_in_place_are_computed_again(calls: list[str], off: Any) -> None:
    def changed(x: Tensor, w: Tensor) -> Tensor:
        o = lv_xattn(*(heads(x @ w[i]) for i in range(3)))
        with torch.no_grad():
            o.mul_(2.0)
        return o.sin() * w[3].sum()

    with off():
        expected = gradients(again(changed))
    del calls[:]
    assert_same(gradients(again(changed)), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("replay", [True, False])
def test_dropout_before_attention(calls: list[str], replay: bool) -> None:
    """Without RNG replay (accelerate's wrapper), the attention's own gradients are still those of its forward pass."""

    def run(function: Layer) -> list[Tensor]:
        grads: list[Tensor] = []
        x, w = leaves()
        torch.manual_seed(3)

        def region(x: Tensor, w: Tensor) -> Tensor:
            x = torch.nn.functional.dropout(x @ w[3], 0.5)
            qkv = [heads(x @ w[i]) for i in range(3)]
            for t in qkv:
                t.register_hook(grads.append)
            return lv_xattn(*qkv)

        function(region)(x, w).square().sum().backward()
        return [*grads, x.grad, w.grad] if replay else grads

    expected = run(lambda region: region)
    assert_same(run(lambda region: again(region, preserve_rng_state=replay)), expected)
    assert len(calls) == 2


def test_unknown_hooks_compute_attention_again(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a version of torch that has other names."""
    expected = gradients(layer)
    with monkeypatch.context() as patch:
        patch.setattr(kept_results, "_HOOKS_MODULE", "torch.another_module")
        assert_same(gradients(again(layer)), expected)
    assert len(calls) == 3
    renamed = kept_results._variable

    def variable(function: Any, name: str) -> Any:
        return renamed(function, "renamed" if name == "recompute_context" else name)

    monkeypatch.setattr(kept_results, "_variable", variable)
    assert_same(gradients(again(layer)), expected)
    assert len(calls) == 5


DISTRIBUTED = {
    "lv": functools.partial(lv_xattn),
    "ring": functools.partial(ring_attention, causal=True),
    "mesh": functools.partial(mesh_attention, tile=(2, 2), causal=True),
    "ulysses": functools.partial(ulysses_attention, causal=True, layout="striped"),
    "hybrid": functools.partial(ulysses_attention, tile=(2, 1), causal=True),
}


@pytest.mark.parametrize("name", list(DISTRIBUTED))
def test_recomputation_sends_nothing_but_head_shards_of_its_inputs(calls: list[str], name: str) -> None:
    """The backward pass of Ulysses needs Q, K and V of its heads, which the region does not keep."""

    def run(comm: Communicator, checkpointed: bool) -> tuple[list[Tensor], dict[str, int]]:
        x, w = leaves(comm.rank)
        one = functools.partial(layer, function=DISTRIBUTED[name], group=comm)
        y = twice(again(one) if checkpointed else one)(x, w)
        y.square().sum().backward()
        sent = dict(comm.bytes.sent)
        sent.pop("agreement")
        return [y.detach(), x.grad, w.grad], sent

    results = []
    for checkpointed in (False, True):
        results.append(run_nccl_model(4, run, checkpointed))
        assert len(calls) == 4 * 2
        del calls[:]
    sent_again = ("q", "k", "v") if name in ("ulysses", "hybrid") else ()
    for (expected, plain), (found, sent) in zip(*results, strict=True):
        assert_same(found, expected)
        assert sent.keys() == plain.keys()
        for label, size in plain.items():
            assert size < sent[label] <= 2 * size if label in sent_again else sent[label] == size, label
