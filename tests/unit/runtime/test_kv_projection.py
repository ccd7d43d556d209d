"""Layer: one process. Gradients of projections of norms, linear layers and a rotation, against autograd's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from family_cases import BATCHES, CROSS_ATTENTION
from family_harness import inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.attention.attend import attend
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.masks import BlockMasks
from mllm_seqpar.runtime import visual_features as visual
from mllm_seqpar.runtime.projections import KVProjection
from mllm_seqpar.runtime.visual_features import RecomputedKeys, VisualFeatures
from tolerances import AGAINST_UNPATCHED, EXACT, relative_error

HEADS, DIM, WIDTH, FRAMES, TOKENS = 2, 8, 12, 5, 3
KEYS = FRAMES * TOKENS
PRODUCT = 2 * KEYS * WIDTH * HEADS * DIM
"""FLOPs of one matrix multiplication between the features and K or V."""


def rotate(k: Tensor, index: Tensor, transposed: bool) -> Tensor:
    """Rotate pairs of channels, and scale them, so that the inverse is not the transpose."""
    angle = (-1) ** transposed * index[:, None, None, None].to(k.dtype) * 0.3
    first, second = k.chunk(2, dim=-1)
    turned = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    return 1.3 * torch.cat(turned, dim=-1).to(k.dtype)


@dataclass(frozen=True)
class Setting:
    layout: str = "separate"
    input_norm: bool = False
    key_norm: bool = False
    rotates: bool = False
    rotates_first: bool = False
    dtype: torch.dtype = torch.float64
    weights: torch.dtype | None = None  # autocast to `dtype` is enabled if they differ
    frozen: tuple[str, ...] = ()
    features: bool = True


def projection_of(setting: Setting) -> KVProjection:
    """Return a projection with the same random weights for every dtype, with biases where there may be one."""
    size = HEADS * DIM
    linears = [nn.Linear(WIDTH, 2 * size)]
    if setting.layout == "separate":
        linears = [nn.Linear(WIDTH, size, bias=False), nn.Linear(WIDTH, size)]
    norms = nn.LayerNorm(WIDTH) if setting.input_norm else None, nn.RMSNorm(DIM) if setting.key_norm else None
    turn = rotate if setting.rotates else None
    projection = KVProjection(tuple(linears), DIM, setting.layout == "interleaved", *norms, turn, setting.rotates_first)
    generator = torch.Generator().manual_seed(3)
    for module in projection.modules:
        for name, parameter in module.named_parameters():
            mean = 1.0 if parameter.dim() == 1 and name == "weight" else 0.0
            nn.init.normal_(parameter, mean, 0.3, generator=generator)
        module.to(torch.bfloat16 if setting.dtype is torch.bfloat16 else None).to(setting.weights or setting.dtype)
    for part in setting.frozen:
        named = {"input_norm": projection.input_norm, "k": projection.linears[0], "v": projection.linears[-1]}
        named[part].requires_grad_(False)
    return projection


def source_of(projection: KVProjection, setting: Setting) -> RecomputedKeys:
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(FRAMES, TOKENS, WIDTH, generator=generator).bfloat16().to(setting.weights or setting.dtype)
    shared = VisualFeatures(features.requires_grad_(setting.features), torch.arange(FRAMES), FRAMES)
    spec = CallSpec((1, 1), BlockMasks.full(1, 1, (KEYS,)), (KEYS,), torch.float32)
    return RecomputedKeys(spec, shared, projection, setting.dtype)


def gradients(projection: KVProjection, setting: Setting) -> list[Tensor | None]:
    """Return what a backward pass computes for random gradients of k and v."""
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.weights is not None):
        source = source_of(projection, setting)
    inputs = source.inputs()
    keys, saved = source.for_backward(inputs)
    k, _, grads = keys.vjp(saved, [x.requires_grad for x in inputs])
    generator = torch.Generator().manual_seed(5)
    dk, dv = (torch.randn(k.shape, generator=generator).bfloat16() for _ in range(2))
    wide = torch.promote_types(torch.float32, setting.dtype)
    return list(grads(dk.to(wide), dv.to(wide)))


@contextlib.contextmanager
def by_autograd() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVProjection, "has_direct_grads", lambda *_: False)
        yield


def direct_and_autograd(setting: Setting) -> tuple[list[Tensor | None], list[Tensor | None]]:
    direct = gradients(projection_of(setting), setting)
    with by_autograd():
        return direct, gradients(projection_of(setting), setting)


SETTINGS = [
    Setting(layout, *parts)
    for layout in ("separate", "halves", "interleaved")
    for parts in itertools.product((False, True), repeat=3)
] + [Setting("separate", key_norm=True, rotates=True, rotates_first=True)]


@pytest.mark.parametrize("frames_at_once", [2, FRAMES])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_direct_gradients_are_those_of_autograd(
    setting: Setting, frames_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visual, "CHUNK_BYTES", frames_at_once * TOKENS * WIDTH * 8)
    for ours, theirs in pairs(*direct_and_autograd(setting)):
        assert relative_error(ours, theirs) <= EXACT[torch.float64]


@pytest.mark.parametrize("weights", [None, torch.float32], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_direct_gradients_in_16_bit_are_as_exact_as_autograds(setting: Setting, weights: torch.dtype | None) -> None:
    low = replace(setting, dtype=torch.bfloat16, weights=weights)
    wide = projection_of(low)  # whose parameters are rounded to bfloat16 in every setting
    for module in wide.modules:
        module.double()
    exact = gradients(wide, setting)
    direct, autograd = direct_and_autograd(low)
    assert {None if grad is None else grad.dtype for grad in direct} == {weights or torch.bfloat16}
    # Gradients of biases and norms have a few entries, whose errors are chance: all are compared together.
    errors = [sum(relative_error(x, y) ** 2 for x, y in pairs(found, exact)) ** 0.5 for found in (direct, autograd)]
    assert errors[0] <= AGAINST_UNPATCHED * errors[1]


def pairs(found: list[Tensor | None], expected: list[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in zip(found, expected, strict=True):
        assert x is not None and y is not None
        yield x, y


def counted(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("setting", "products"),
    [
        (Setting(key_norm=True, rotates=True), 4),  # d raw K and dV times W^T, and times x
        (Setting(features=False), 2),
        (Setting(frozen=("k", "v")), 2),
        (Setting(frozen=("k", "v"), features=False), 0),
        (Setting(frozen=("k",), features=False), 1),
        (Setting(input_norm=True, frozen=("k", "v"), features=False), 2),
    ],
    ids=str,
)
def test_backward_multiplies_matrices_only_for_needed_gradients(setting: Setting, products: int) -> None:
    """The projection of K and V for attention is two products."""
    assert counted(lambda: gradients(projection_of(setting), setting)) == (2 + products) * PRODUCT


def test_no_gradient_is_computed_for_frozen_parts() -> None:
    frozen = Setting(input_norm=True, frozen=("input_norm", "k"))
    projection = projection_of(frozen)
    names = ["features", "v.weight", "v.bias"]
    found = dict(zip(names, gradients(projection, frozen), strict=True))
    whole = gradients(projection_of(Setting(input_norm=True)), frozen)
    for name, expected in zip(names, (whole[0], *whole[-2:]), strict=True):
        assert relative_error(found[name], expected) <= EXACT[torch.float64], name
    found = gradients(projection, replace(frozen, features=False))
    assert found[0] is None and all(grad is not None for grad in found[1:])


def test_rank_without_frames_gets_zero_gradients() -> None:
    setting = Setting(key_norm=True, input_norm=True)
    source = source_of(projection_of(setting), setting)
    empty = VisualFeatures(torch.zeros(0, TOKENS, WIDTH, dtype=torch.float64), torch.arange(0), FRAMES)
    source = replace(source, visual=empty)
    inputs = source.inputs()
    keys, saved = source.for_backward(inputs)
    k, v, input_grads = keys.vjp(saved, [True] * len(inputs))
    grads = input_grads(k, v)
    assert all(
        grad is not None and grad.shape == x.shape and not grad.any() for grad, x in zip(grads, inputs, strict=True)
    )


def _doubled(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return 2 * output


def _with_lora(linear: nn.Linear) -> nn.Module:
    config = LoraConfig(target_modules=["0"], init_lora_weights=False)
    return inject_adapter_in_model(config, nn.Sequential(linear))[0]


def _with_other_forward(linear: nn.Linear) -> nn.Linear:
    linear.forward = lambda x: 2 * nn.functional.linear(x, linear.weight)  # type: ignore[method-assign]
    return linear


def _with_hook(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(_doubled)
    return linear


class _ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class _QuantisedWeight(Tensor):
    pass


def _with_other_tensor(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(_QuantisedWeight))
    return linear


MODIFIED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "LoRA": _with_lora,
    "hook": _with_hook,
    "replaced forward": _with_other_forward,
    "parametrization": parametrizations.weight_norm,
    "subclass": lambda linear: _ScaledLinear(linear.in_features, linear.out_features, bias=False),
    "tensor subclass": _with_other_tensor,
}


@pytest.mark.parametrize("how", MODIFIED)
def test_modified_linear_layers_are_differentiated_by_autograd(how: str) -> None:
    plain = Setting(key_norm=True, dtype=torch.float32)
    base = projection_of(plain)
    projection = replace(base, linears=(MODIFIED[how](base.linears[0]), base.linears[1]))  # type: ignore[arg-type]
    source = source_of(projection, plain)
    assert not projection.has_direct_grads(())
    inputs = source.inputs()
    keys, saved = source.for_backward(inputs)
    k, v, grads = keys.vjp(saved, [True] * len(inputs))
    found = grads(k, v)
    ks, vs = projection(source.visual.features, source.visual.index)
    expected = torch.autograd.grad([ks, vs], list(inputs), [k, v])
    for ours, theirs in pairs(list(found), list(expected)):
        assert relative_error(ours, theirs) <= EXACT[torch.float32]


def test_hook_of_every_module_is_differentiated_by_autograd() -> None:
    projection = projection_of(Setting())
    with FlopCounterMode(display=False):  # its hooks, which are torch's own, change nothing
        assert projection.has_direct_grads(())
    handle = nn.modules.module.register_module_forward_hook(_doubled)
    try:
        assert not projection.has_direct_grads(())
    finally:
        handle.remove()
    assert projection.has_direct_grads(())


def test_parameter_that_the_modules_lack_is_differentiated_by_autograd() -> None:
    projection = projection_of(Setting())
    assert not projection.has_direct_grads([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("how", ["direct", "LoRA"])
def test_hook_on_a_parameter_runs_once(how: str) -> None:
    setting = Setting(input_norm=True, key_norm=True)
    projection = projection_of(setting)
    if how == "LoRA":
        projection = replace(projection, linears=(_with_lora(projection.linears[0]), projection.linears[1]))
    calls: list[Tensor] = []
    for module in projection.modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(calls.append)
    source = source_of(projection, setting)
    q = torch.randn(1, HEADS, 1, DIM, dtype=torch.float64)
    ((o, _),) = attend(q, [[source]], rows="sharded", comm=as_communicator("self"), scale=1.0)
    o.sum().backward()
    assert len(calls) == len(source.inputs()) - 1
    assert all(parameter.grad is not None for parameter in source.inputs()[1:])


def test_keys_before_the_norm_are_kept_in_backward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(key_norm=True)
    source = source_of(projection_of(setting), setting)
    kept: list[Any] = []
    project = KVProjection.__call__

    def watched(self: Any, *args: Any, raw_keys: Any = None) -> Any:
        kept.append(raw_keys)
        return project(self, *args, raw_keys=raw_keys)

    monkeypatch.setattr(KVProjection, "__call__", watched)
    forward = list(source.inputs())
    source.keys_values(forward)
    assert kept == [None]
    source.vjp(forward, [False] * len(forward))
    assert kept == [None, None], "nothing is differentiated"
    k, v, grads = source.vjp(source.for_backward(forward)[1], [True] * len(forward))
    assert [x.shape for x in kept[-1]] == [(FRAMES, TOKENS, HEADS, DIM)]
    found = list(grads(k, v))
    assert kept[-1] == []
    with by_autograd():
        _, _, grads = source.vjp(forward, [True] * len(forward))
    with by_autograd():
        expected = list(grads(k, v))  # projects K again
    for ours, theirs in pairs(found, expected):
        assert relative_error(ours, theirs) <= EXACT[torch.float64]


@pytest.mark.parametrize("visual_offload", [None, "cpu"])
@pytest.mark.parametrize("family", CROSS_ATTENTION)
def test_training_step_of_family_projects_keys_and_values_twice(
    family: str, visual_offload: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flops: dict[str, list[int]] = {"keys_values": [], "_input_grads": []}
    for name, found in flops.items():
        method = getattr(RecomputedKeys, name)

        def counting(*args: Any, method: Any = method, found: list[int] = found) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = method(*args)
            found.append(counter.get_total_flops())
            return result

        monkeypatch.setattr(RecomputedKeys, name, counting)
    case = BATCHES[family]
    model = model_of(family, case)
    inputs = inputs_of(family, case, model)
    patch_model(model, visual_offload=visual_offload)(**inputs).loss.backward()
    layers = len(flops["_input_grads"])
    assert layers > 0 and len(flops["keys_values"]) == 2 * layers
    once = flops["keys_values"][0]
    assert once > 0 and flops["keys_values"] == [once] * 2 * layers
    # Rotary angles are a small product in some versions of transformers.
    twice = pytest.approx(2 * once, rel=1e-3)
    assert flops["_input_grads"] == [twice] * layers, "gradients of weights and of features, no other projection"


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_v_keeps_no_storage_of_the_unmodified_k_alive_and_is_copied_once(layout: str) -> None:
    """Of one linear layer for K and V. A cache stores what the projection returns."""
    projection = projection_of(Setting(layout, rotates=True))
    features = torch.randn(FRAMES, TOKENS, WIDTH, dtype=torch.float64)
    _, v = projection(features, torch.arange(FRAMES))
    assert v.untyped_storage().nbytes() == v.numel() * v.element_size()
    assert v.is_contiguous(), "as attention and transfers need it"
