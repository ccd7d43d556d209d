"""Layer: one process. A token-wise module in chunks gives what it gives at once: results, gradients, random numbers."""

from __future__ import annotations

import pytest
import torch
from modules import KINDS, WIDTH, chunked, gradients, inputs_for, made, weights_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mllm_seqpar.errors import ConfigError, ShapeError
from tolerances import AGAINST_UNPATCHED, EXACT, relative_error

pytestmark = pytest.mark.rounding


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert relative_error(mine, theirs) < EXACT[theirs.dtype]


@pytest.mark.parametrize("size", [1, 3, 7, 13, 14, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients(kind: str, dtype: torch.dtype, size: int) -> None:
    """2 samples of 7 tokens: chunks that divide and do not, that cross the samples' border, and one chunk for all."""
    module, inputs = made(kind, dtype), inputs_for(kind, 2, 7, dtype=dtype)
    of = [*inputs, *module.parameters()]
    plain, mine = module(*inputs), chunked(module, size, *inputs)
    assert_close([mine, *gradients(mine, of)], [plain, *gradients(plain, of)])


@pytest.mark.parametrize("shape", [(9,), (2, 2, 3), (1, 9)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    module, (x,) = made("gated"), inputs_for("gated", *shape)
    seen: list[tuple[int, ...]] = []
    module.gate.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    y = chunked(module, 4, x)
    assert_close([y], [module(x)])
    assert {len(s) for s in seen} == {x.dim()}  # modules may look at it


def test_inputs_that_are_not_contiguous() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 7, 2)
    plain, mine = module(x.transpose(0, 1)), chunked(module, 3, x.transpose(0, 1))
    assert_close([mine, *gradients(mine, [x])], [plain, *gradients(plain, [x])])


@pytest.mark.parametrize("frozen", ["weights", "input", "some weights"])
def test_only_what_wants_a_gradient_gets_one(frozen: str) -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    if frozen == "input":
        x.requires_grad_(False)
    for name, p in module.named_parameters():
        p.requires_grad_(frozen == "input" or (frozen == "some weights" and name.startswith("up")))
    of = [t for t in (x, *module.parameters()) if t.requires_grad]
    plain, mine = module(x), chunked(module, 3, x)
    assert_close(gradients(mine, of), gradients(plain, of))
    mine = chunked(module, 3, x)
    (mine * weights_of(mine)).sum().backward()
    assert all((t.grad is not None) is t.requires_grad for t in (x, *module.parameters()))


def test_nothing_wants_a_gradient() -> None:
    module, (x,) = made("gated").requires_grad_(False), inputs_for("gated", 2, 7)
    assert not chunked(module, 3, x.detach()).requires_grad


def test_a_parameter_that_is_not_used_has_no_gradient() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    module.extra = nn.Parameter(torch.ones(3))
    chunked(module, 3, x).sum().backward()
    assert module.extra.grad is None  # an optimizer would decay it


def test_a_shared_weight_gets_the_sum() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    module.up.weight = module.gate.weight
    of = [x, *module.parameters()]
    plain, mine = module(x), chunked(module, 3, x)
    assert_close(gradients(mine, of), gradients(plain, of))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_the_same_in_backward(kind: str) -> None:
    """Against the chunks one by one through autograd alone, which draw the same numbers."""
    module, inputs = made(kind, dropout=0.4).train(), inputs_for(kind, 2, 7)
    of = [*inputs, *module.parameters()]
    torch.manual_seed(5)
    flat = [x.reshape(1, 14, WIDTH) for x in inputs]
    parts = [module(*(x[:, start : start + 4] for x in flat)) for start in range(0, 14, 4)]
    plain = torch.cat(parts, 1).reshape(2, 7, WIDTH)
    after = torch.get_rng_state()

    torch.manual_seed(5)
    mine = chunked(module, 4, *inputs)
    assert torch.equal(torch.get_rng_state(), after)
    assert (parts[0] - module.eval()(*(x[:, :4] for x in flat))).abs().max() > 0.01
    module.train()
    torch.rand(3)  # others draw in between
    before = torch.get_rng_state()
    assert_close([mine, *gradients(mine, of)], [plain, *gradients(plain, of)])
    assert torch.equal(torch.get_rng_state(), before)  # and draw on as if nothing had been recomputed


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    """Backward inside or outside of autocast computes as forward did."""
    module, (x,) = made("gated", torch.float32), inputs_for("gated", 4, 50, dtype=torch.float32)
    of = [x, *module.parameters()]
    exact_module, exact_x = made("gated"), x.detach().double().requires_grad_()
    exact_y = exact_module(exact_x)
    exact = gradients(exact_y, [exact_x, *exact_module.parameters()])
    dtypes: list[torch.dtype] = []
    module.down.register_forward_hook(lambda _, args, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        plain, mine = module(x), chunked(module, 16, x)
        found = gradients(mine, of) if inside else None
    found = gradients(mine, of) if found is None else found
    assert mine.dtype == torch.bfloat16
    # not the same bits: how a processor sums a product of matrices may depend on the number of rows
    assert relative_error(mine, exact_y) <= AGAINST_UNPATCHED * relative_error(plain, exact_y)
    for grad, theirs, reference in zip(found, gradients(plain, of), exact, strict=True):
        assert grad.dtype == torch.float32
        assert relative_error(grad, reference) <= AGAINST_UNPATCHED * relative_error(theirs, reference)
    assert dtypes == [torch.bfloat16] * (1 + 2 * 13)


def test_autocast_keeps_no_weights_without_gradient() -> None:
    """Casts of weights are cached: one made without grad mode would leave the next pass without a gradient."""
    module, (x,) = made("gated", torch.float32), inputs_for("gated", 2, 7, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        chunked(module, 4, x)
        found = torch.autograd.grad(module(x).float().sum(), [*module.parameters()], allow_unused=True)
    assert all(grad is not None for grad in found)


def test_sums_in_bfloat16_lose_nothing() -> None:
    """The gradient of a bfloat16 weight over many chunks is as near to float64 as that of a single matrix product."""
    module, (x,) = made("gated", torch.bfloat16), inputs_for("gated", 8, 256, dtype=torch.bfloat16)
    x = (x + 1).detach().requires_grad_()  # sums that grow, and so lose small terms
    exact_module, exact_x = made("gated", torch.bfloat16).double(), x.detach().double()
    weights = list(module.parameters())
    exact = torch.autograd.grad(exact_module(exact_x).sum(), list(exact_module.parameters()))
    plain = torch.autograd.grad(module(x).sum(), weights)
    mine = torch.autograd.grad(chunked(module, 8, x).sum(), weights)
    for found, theirs, reference in zip(mine, plain, exact, strict=True):
        assert relative_error(found, reference) < max(1.2 * relative_error(theirs, reference), 4e-3)


def test_without_grad_mode_nothing_is_recomputed() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    rows: list[int] = []
    module.down.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[-2]))
    with torch.no_grad():
        y = chunked(module, 4, x)
    assert not y.requires_grad and rows == [4, 4, 4, 2]
    assert_close([y], [module(x).detach()])


@pytest.mark.parametrize("residual", [True, False])
def test_inside_gradient_checkpointing(residual: bool) -> None:
    """The layer's recomputation stops short of the MLP, unless something behind the MLP was kept."""
    module, (x,) = made("gated", dropout=0.3).train(), inputs_for("gated", 2, 7)
    of, rows = [x, *module.parameters()], []
    module.down.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[-2]))

    def layer(x: Tensor) -> Tensor:
        y = chunked(module, 4, x.sin())
        return x + y if residual else y * y

    torch.manual_seed(3)
    plain = layer(x)
    expected = [plain, *gradients(plain, of)]
    once = len(rows)
    rows.clear()
    torch.manual_seed(3)
    mine = checkpoint(layer, x, use_reentrant=False)
    assert_close([mine, *gradients(mine, of)], expected)
    assert once == 8 and len(rows) == (8 if residual else 12)


def test_hooks_of_a_parameter_run_once() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    (expected,) = gradients(module(x), [module.up.weight])
    seen: list[Tensor] = []
    module.up.weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    y = chunked(module, 3, x)
    (y * weights_of(y)).sum().backward()
    assert len(seen) == 1
    assert_close([module.up.weight.grad], [2 * expected])


def test_the_modules_keep_their_parameters_when_backward_fails() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    before = {name: id(p) for name, p in module.named_parameters()}
    y = chunked(module, 3, x)
    failing = module.down.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    failing.remove()
    assert {name: id(p) for name, p in module.named_parameters()} == before


def test_backward_twice() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    y = chunked(module, 3, x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        y.backward()


def test_saved_tensors_may_be_offloaded() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    of = [x, *module.parameters()]
    expected = gradients(module(x), of)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        y = chunked(module, 3, x)
    assert_close(gradients(y, of), expected)


def test_what_is_refused() -> None:
    module, (x,) = made("gated"), inputs_for("gated", 2, 7)
    with pytest.raises(ShapeError, match=r"\[\(2, 7, 8\), \(2, 6, 8\)\] are not of the same tokens"):
        chunked(made("residual"), 3, x, x[:, 1:])
    with pytest.raises(ShapeError, match=r"Pooling made \(1, 1, 8\) of \(1, 3, 8\); it must give one row for every"):
        chunked(Pooling(), 3, x)
    y = chunked(module, 3, x)
    module.up.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="5 parameters of Gated wanted a gradient in the forward pass and 4 do in"):
        y.sum().backward()
    y = chunked(Scaled(), 3, x)
    with pytest.raises(ConfigError, match=r"Scaled computes with a tensor of shape \(8,\) that wants a gradient"):
        y.sum().backward()
    (dx,) = torch.autograd.grad(chunked(module, 3, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


class Pooling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-2, keepdim=True)


class Scaled(nn.Module):
    """With a weight that is a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()
