"""Layer: one process. A token-wise module in chunks gives the results, gradients and random numbers of one pass."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mllm_seqpar.chunked_mlp import TokenwiseFunction, run_in_chunks
from mllm_seqpar.errors import ConfigError, ShapeError
from tolerances import AGAINST_UNPATCHED, EXACT, relative_error

WIDTH, INNER = 8, 24


class Gated(nn.Module):
    """Three projections, as in the MLPs of LLaMA, Qwen2, IDEFICS and Mllama."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, bias=False)
        self.down, self.dropout = nn.Linear(INNER, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), self.dropout, self.training))


class Residual(nn.Module):
    """Two inputs, as in MPT's MLP, and dropout without a module."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), dropout

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training) + residual


class Normed(nn.Sequential):
    """With its own norm, as in OpenFlamingo's gated cross-attention."""

    def __init__(self, dropout: float) -> None:
        linears = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        super().__init__(nn.LayerNorm(WIDTH), linears[0], nn.GELU(), nn.Dropout(dropout), linears[1])


KINDS = (Gated, Residual, Normed)


def module_and_inputs(
    kind: Any = Gated, shape: tuple[int, ...] = (2, 7), dtype: torch.dtype = torch.float64, dropout: float = 0.0
) -> tuple[Any, list[Tensor]]:
    """Return a module with fixed random weights, and its inputs (*shape, WIDTH)."""
    torch.manual_seed(0)
    module = kind(dropout).to(dtype)
    values = torch.randn(2 if kind is Residual else 1, *shape, WIDTH, dtype=torch.float64).to(dtype)
    return module, [x.clone().requires_grad_() for x in values]


def chunked(module: nn.Module, size: int, *inputs: Tensor) -> Tensor:
    return run_in_chunks(TokenwiseFunction(module.forward, [module], module), size, *inputs)


def with_gradients(y: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return `y` and the gradients of a loss whose gradient differs in every entry of `y`."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), leaves)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert relative_error(mine, theirs) < EXACT[theirs.dtype]


def assert_equals_unchunked(module: nn.Module, size: int, inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    assert_close(with_gradients(chunked(module, size, *inputs), leaves), with_gradients(module(*inputs), leaves))


@pytest.mark.parametrize("size", [1, 3, 13, 14])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_equal_the_unchunked_module(kind: Any, size: int) -> None:
    """2 samples of 7 tokens: chunks that divide and do not, that cross the samples' border, and one chunk for all."""
    module, inputs = module_and_inputs(kind)
    leaves = [*inputs, *module.parameters()]
    assert_equals_unchunked(module, size, inputs, leaves)
    # The same if saved tensors are offloaded.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        assert_equals_unchunked(module, size, inputs, leaves)


@pytest.mark.parametrize("shape", [(9,), (2, 2, 3), (7, 2)])
def test_module_receives_tensors_of_the_same_number_of_dimensions(shape: tuple[int, ...]) -> None:
    module, (leaf,) = module_and_inputs(shape=shape)
    x = leaf.transpose(0, 1) if shape == (7, 2) else leaf  # not contiguous
    dims: set[int] = set()
    module.gate.register_forward_pre_hook(lambda _, args: dims.add(args[0].dim()))
    assert_equals_unchunked(module, 4, [x], [leaf])
    assert dims == {x.dim()}


@pytest.mark.parametrize("frozen", ["weights", "input", "some weights"])
def test_only_leaves_that_require_grad_receive_gradients(frozen: str) -> None:
    module, (x,) = module_and_inputs()
    x.requires_grad_(frozen != "input")
    for name, p in module.named_parameters():
        p.requires_grad_(frozen == "input" or (frozen == "some weights" and name.startswith("up")))
    assert_equals_unchunked(module, 3, [x], [t for t in (x, *module.parameters()) if t.requires_grad])
    chunked(module, 3, x).sum().backward()
    assert all((t.grad is not None) is t.requires_grad for t in (x, *module.parameters()))


def test_unused_parameter_has_no_gradient_and_shared_one_has_the_sum() -> None:
    module, (x,) = module_and_inputs()
    module.up.weight = module.gate.weight
    module.extra = nn.Parameter(torch.ones(3))
    assert_equals_unchunked(module, 3, [x], [x, *(p for p in module.parameters() if p is not module.extra)])
    chunked(module, 3, x).sum().backward()
    assert module.extra.grad is None  # an optimizer would decay it


@pytest.mark.parametrize("kind", KINDS)
def test_backward_replays_dropout(kind: Any) -> None:
    """The reference computes the chunks one by one through autograd alone, with the same random numbers."""
    module, inputs = module_and_inputs(kind, dropout=0.4)
    leaves = [*inputs, *module.train().parameters()]
    torch.manual_seed(5)
    flat = [x.reshape(1, 14, WIDTH) for x in inputs]
    parts = [module(*(x[:, start : start + 4] for x in flat)) for start in range(0, 14, 4)]
    expected = with_gradients(torch.cat(parts, 1).reshape(2, 7, WIDTH), leaves)
    after_forward = torch.get_rng_state()

    torch.manual_seed(5)
    out = chunked(module, 4, *inputs)
    assert torch.equal(torch.get_rng_state(), after_forward)
    torch.rand(3)  # something else draws between forward and backward
    before_backward = torch.get_rng_state()
    assert_close(with_gradients(out, leaves), expected)
    assert torch.equal(torch.get_rng_state(), before_backward)
    assert not torch.equal(chunked(module.eval(), 4, *inputs), out)


@pytest.mark.rounding
@pytest.mark.parametrize("inside", [True, False])
def test_backward_uses_the_autocast_of_forward(inside: bool) -> None:
    module, (x,) = module_and_inputs(shape=(4, 50), dtype=torch.float32)
    leaves = [x, *module.parameters()]
    exact_module, exact_x = deepcopy(module).double(), x.detach().double().requires_grad_()
    exact = with_gradients(exact_module(exact_x), [exact_x, *exact_module.parameters()])
    dtypes: list[torch.dtype] = []
    with torch.autocast("cpu", torch.bfloat16):
        plain = with_gradients(module(x), leaves)
        module.down.register_forward_hook(lambda _, args, out: dtypes.append(out.dtype))
        out = chunked(module, 16, x)
        found = with_gradients(out, leaves) if inside else []
    found = found or with_gradients(out, leaves)
    assert dtypes == [torch.bfloat16] * (2 * 13)
    # Not the same bits: how a processor sums a matrix product may depend on the number of rows.
    for mine, theirs, reference in zip(found, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, reference) <= AGAINST_UNPATCHED * relative_error(theirs, reference)


def test_autocast_caches_no_weight_without_gradient() -> None:
    """A cached cast that was made without grad mode would leave the next pass without gradients."""
    module, (x,) = module_and_inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        chunked(module, 4, x)
        found = torch.autograd.grad(module(x).float().sum(), [*module.parameters()], allow_unused=True)
    assert all(grad is not None for grad in found)


@pytest.mark.rounding
def test_bfloat16_weight_gradients_are_summed_in_float32() -> None:
    """Over many chunks they are as close to float64 as those of a single matrix product."""
    module, (x,) = module_and_inputs(shape=(8, 256), dtype=torch.bfloat16)
    x = (x + 1).detach().requires_grad_()  # the sums grow, and would lose small terms
    exact_module, weights = deepcopy(module).double(), list(module.parameters())
    exact = torch.autograd.grad(exact_module(x.detach().double()).sum(), list(exact_module.parameters()))
    plain = torch.autograd.grad(module(x).sum(), weights)
    mine = torch.autograd.grad(chunked(module, 8, x).sum(), weights)
    for found, theirs, reference in zip(mine, plain, exact, strict=True):
        assert relative_error(found, reference) < max(1.2 * relative_error(theirs, reference), 4e-3)


def test_without_grad_nothing_is_recomputed() -> None:
    module, (x,) = module_and_inputs()
    rows: list[int] = []
    with torch.no_grad():
        expected = module(x)
        module.down.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[-2]))
        y = chunked(module, 4, x)
    assert not y.requires_grad and rows == [4, 4, 4, 2]
    assert_close([y], [expected])
    assert not chunked(module.requires_grad_(False), 3, x.detach()).requires_grad


@pytest.mark.parametrize("residual", [True, False])
def test_gradient_checkpointing_recomputes_the_mlp_only_if_needed(residual: bool) -> None:
    """The layer's recomputation stops before the MLP unless something after the MLP was saved."""
    module, (x,) = module_and_inputs(dropout=0.3)
    leaves, calls = [x, *module.train().parameters()], []

    def layer(x: Tensor) -> Tensor:
        y = chunked(module, 4, x.sin())
        return x + y if residual else y * y

    torch.manual_seed(3)
    expected = with_gradients(layer(x), leaves)
    module.down.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(3)
    assert_close(with_gradients(checkpoint(layer, x, use_reentrant=False), leaves), expected)
    assert len(calls) == (8 if residual else 12)


def test_parameter_hooks_run_once() -> None:
    module, (x,) = module_and_inputs()
    calls: list[Tensor] = []
    module.up.weight.register_hook(lambda grad: calls.append(grad) or 2 * grad)
    assert_equals_unchunked(module, 3, [x], [module.up.weight])
    assert len(calls) == 2  # chunked and not
    assert_close(calls[:1], calls[1:])


def test_modules_have_their_parameters_back_after_a_failing_backward() -> None:
    module, (x,) = module_and_inputs()
    before = {name: id(p) for name, p in module.named_parameters()}
    y = chunked(module, 3, x)
    module.down.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert {name: id(p) for name, p in module.named_parameters()} == before


def test_graph_may_be_retained_and_is_freed_otherwise() -> None:
    module, (x,) = module_and_inputs()
    y = chunked(module, 3, x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        y.backward()


class Pooling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-2, keepdim=True)


class HiddenLeaf(nn.Module):
    """Computes with a tensor that requires grad and is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


def test_invalid_modules_and_inputs_are_refused() -> None:
    module, (x,) = module_and_inputs()
    with pytest.raises(ShapeError, match=r"\[\(2, 7, 8\), \(2, 6, 8\)\] are not of the same tokens"):
        chunked(module_and_inputs(Residual)[0], 3, x, x[:, 1:])
    with pytest.raises(ShapeError, match=r"Pooling made \(1, 1, 8\) of \(1, 3, 8\); it must give one row for every"):
        chunked(Pooling(), 3, x)
    y = chunked(module, 3, x)
    module.up.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="parameters of Gated were replaced, modified, frozen or unfrozen"):
        y.sum().backward()
    y = chunked(HiddenLeaf(), 3, x)
    with pytest.raises(ConfigError, match=r"HiddenLeaf computes with a tensor of shape \(8,\) that requires grad"):
        y.sum().backward()
    (dx,) = torch.autograd.grad(chunked(module, 3, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
