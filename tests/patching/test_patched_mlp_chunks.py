"""Layer: gloo ranks. mPLUG-Owl3 with `mlp_chunk_size`: the unpatched loss, logits and gradients; LoRA in its MLPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patched import GATES, PATIENCE, Case, check, inputs_of, patched_rank, reference
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from mllm_seqpar import patch_model, unpatch_model
from outcomes import error, run_case, worst_gradient
from ranks import ranks
from tiny import tiny_model

SIZE = 5
CASE = Case(frames=(4, 1))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("gate", GATES)
def test_equals_unpatched(gate: str | None, world: int) -> None:
    """2 samples of 13 tokens: on two ranks, chunks of 5, 5 and 4 tokens."""
    case = CASE.with_options(mlp_chunk_size=SIZE)
    check(ranks(world).run(patched_rank, gate, case, timeout=PATIENCE), reference(gate, case), case)


@pytest.mark.parametrize("size", [1, 26, 1000])
def test_any_size(size: int) -> None:
    case = CASE.with_options(mlp_chunk_size=size)
    check(ranks(1).run(patched_rank, "per_head", case, timeout=PATIENCE), reference("per_head", case), case)


def test_every_mlp_of_the_language_model_is_computed_in_chunks() -> None:
    model: Any = tiny_model("per_head")
    inputs, found = inputs_of("per_head", CASE, model), {}
    mlps = {name: m for name, m in model.named_modules() if name.endswith("mlp.down_proj") or name.endswith("mlp.fc2")}
    for name, module in mlps.items():
        module.register_forward_pre_hook(lambda _, x, name=name: found.setdefault(name, set()).add(x[0].shape[:-1]))
    patch_model(model, mlp_chunk_size=SIZE)
    model(**inputs).loss.backward()
    unpatch_model(model)
    text = {name: shapes for name, shapes in found.items() if "language_model" in name}
    assert len(text) == 4 and all(shapes == {(1, 5), (1, 1)} for shapes in text.values())  # 26 tokens
    towers = [shapes for name, shapes in found.items() if "language_model" not in name]
    assert towers and all(shapes == {(5, 4)} for shapes in towers)  # the tower's, all frames at once
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("size", [2, None])
def test_the_tower_encodes_so_many_frames_at_once(size: int | None) -> None:
    """5 frames on one process; the loss, logits and gradients are the unpatched model's."""
    model: Any = tiny_model("per_head")
    found: list[int] = []
    tower = model.vision_model.encoder.layers[0]
    tower.register_forward_pre_hook(lambda _, args, kwargs: found.append(args[0].shape[0]), with_kwargs=True)
    patch_model(model, vision_chunk_size=size)
    outcome = run_case(model, inputs_of("per_head", CASE, model))
    assert found == ([2, 2, 1] if size else [5])
    check([outcome], reference("per_head", CASE), CASE)


def with_lora(dropout: float = 0.0) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=dropout,
        target_modules=r".*language_model.*\.(gate|up|down)_proj",
        init_lora_weights=False,
    )
    return get_peft_model(tiny_model("per_head"), config).train()


def outcome(model: nn.Module) -> tuple[float, dict[str, Tensor | None]]:
    loss = model(**inputs_of("per_head", CASE, model)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("patched_first", [True, False])
def test_lora_in_the_mlps(patched_first: bool) -> None:
    expected_loss, expected = outcome(with_lora())
    model: Any
    if patched_first:
        torch.manual_seed(3)
        inner = patch_model(tiny_model("per_head"), mlp_chunk_size=SIZE)
        model = get_peft_model(inner, with_lora().peft_config["default"]).train()
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), with_lora().parameters(), strict=True):
                mine.copy_(theirs)
    else:
        model = patch_model(with_lora(), mlp_chunk_size=SIZE)
    loss, grads = outcome(model)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert sum("lora_" in name and grad is not None for name, grad in grads.items()) == 4 * 3 * 2
    assert worst_gradient(grads, expected)[0] < 1e-5


def test_dropout_in_lora_draws_the_same_numbers_in_backward() -> None:
    """The loss along its gradient grows by the gradient's square: not with other masks in backward."""
    model = patch_model(with_lora(dropout=0.5).double(), mlp_chunk_size=SIZE)
    inputs = inputs_of("per_head", CASE, model)
    inputs["pixel_values"] = inputs["pixel_values"].double()

    def loss() -> Tensor:
        torch.manual_seed(11)
        return model(**inputs).loss

    loss().backward()
    weights = [p for p in model.parameters() if p.grad is not None]
    square = sum(p.grad.square().sum() for p in weights)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for p in weights:
                p += sign * (1 if sign > 0 else 2) * 1e-4 * p.grad
        losses.append(loss().detach())
    assert error((losses[0] - losses[1]) / 2e-4, square) < 1e-3  # the loss is float32
