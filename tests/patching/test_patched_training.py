"""Layer: gloo ranks. Checkpointing, precision, frozen parts and LoRA; what a layer keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patched import GATES, PATIENCE, Case, inputs_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mllm_seqpar import patch_model
from outcomes import average, run_case, worst_gradient
from ranks import ranks
from tiny import tiny_frames, tiny_model, tiny_text
from tolerances import assert_as_near_as_unpatched

BATCH = Case(frames=(3, 2))
ONE_FRAME = Case(frames=(1,), length=9)  # one rank of two has none


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    wrapped = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_kv_proj", "k_proj"], init_lora_weights=False)
    )
    return wrapped


def trained_whole(model: Any) -> Any:
    """Attention in a wrapper that holds the original and the copy that is trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["up_proj"], modules_to_save=["self_attn"]))


def freeze(model: Any, but: str = "", only: str = "") -> Any:
    for name, weight in model.named_parameters():
        weight.requires_grad_(only in name if only else but not in name)
    return model


PREPARED = {
    "gradient checkpointing": lambda model: model.gradient_checkpointing_enable() or model,
    "frozen tower": lambda model: freeze(model, but="vision_model"),
    "frozen language model": lambda model: freeze(model, but="language_model"),
    "only v_kv_proj trains": lambda model: freeze(model, only="v_kv_proj"),
    "only the projector trains": lambda model: freeze(model, only="vision2text_model"),
    "only the gate's layer norm trains": lambda model: freeze(model, only="layers.2.input_layernorm"),
    "LoRA": lora,
    "PEFT trains the attention whole": trained_whole,
    "LoRA with checkpointing": lambda model: lora(PREPARED["gradient checkpointing"](model)),
}


def prepared(gate: str | None, how: str) -> Any:
    return PREPARED[how](tiny_model(gate).train())


def prepared_rank(rank: int, world: int, gate: str | None, how: str, case: Case, options: dict) -> Any:
    model = prepared(gate, how)
    patch_model(model, **options)
    inputs = inputs_of(gate, case, tiny_model(gate))
    outcome = run_case(model, inputs)
    average(outcome.grads, world)
    return outcome


@pytest.mark.parametrize("how", PREPARED)
def test_equals_unpatched_when(how: str) -> None:
    for gate, case, options in (
        ("per_head", BATCH, {}),
        (None, ONE_FRAME, {}),
        (None, BATCH, {"recompute_visual": False, "strategy": "ring"}),
    ):
        expected = run_case(prepared(gate, how), inputs_of(gate, case, tiny_model(gate)))
        outcomes = ranks(2).run(prepared_rank, gate, how, case, options, timeout=PATIENCE)
        assert outcomes[0].loss == pytest.approx(expected.loss, rel=1e-5)
        value, name = worst_gradient(outcomes[0].grads, expected.grads)
        assert value < 1e-5, (value, name)


def with_dropout(rank: int, world: int, checkpointing: bool) -> Any:
    """LoRA dropout before v_kv_proj, seeded alike; the recomputation in backward must drop the same."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model("per_head").train()
    torch.manual_seed(5)
    settings = LoraConfig(r=4, target_modules=["v_kv_proj"], init_lora_weights=False, lora_dropout=0.5)
    model = get_peft_model(model, settings)
    if checkpointing:
        model.gradient_checkpointing_enable()
    patch_model(model)
    weight = next(p for name, p in model.named_parameters() if name.endswith("v_kv_proj.lora_B.default.weight"))
    inputs = inputs_of("per_head", BATCH, tiny_model("per_head"))
    torch.manual_seed(9)
    model(**inputs).loss.backward()
    assert weight.grad is not None
    direction, found = torch.ones_like(weight), weight.grad.sum()
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * 1e-3)
            torch.manual_seed(9)
            losses.append(model(**inputs).loss.double())
            weight.sub_(direction, alpha=sign * 1e-3)
    return found, (losses[0] - losses[1]) / 2e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_in_a_projection_drops_the_same_in_backward(checkpointing: bool) -> None:
    """The gradient against a difference quotient with the same random numbers."""
    outcomes = ranks(2).run(with_dropout, checkpointing, timeout=PATIENCE)
    gradient = sum(found for found, _ in outcomes) / 2
    assert gradient.item() == pytest.approx(outcomes[0][1].item(), rel=2e-2)


def low_precision(rank: int, world: int, gate: str | None, how: str) -> Any:
    model = tiny_model(gate).train()
    inputs = inputs_of(gate, BATCH, model)
    return narrow(model, inputs, how, patched=True, world=world)


def narrow(model: Any, inputs: dict[str, Any], how: str, *, patched: bool, world: int = 1) -> Any:
    """One pass in bf16: by autocast, as bf16 weights, or by FSDP2's policy."""
    if how == "weights":
        model.bfloat16()
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    if how == "policy" and patched:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in [*model.language_model.model.layers, *model.vision_model.encoder.layers]:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    if how == "checkpointed autocast":
        model.gradient_checkpointing_enable()
    if patched:
        patch_model(model)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
        loss = model(**inputs).loss
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    if how == "policy" and patched:
        grads = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    elif patched:
        average(grads, world)
    return loss.item(), {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.rounding
@pytest.mark.parametrize("how", ["autocast", "checkpointed autocast", "weights", "policy"])
@pytest.mark.parametrize("gate", GATES)
def test_bf16_is_as_near_to_float32_as_unpatched(gate: str | None, how: str) -> None:
    """Gradients and loss against float32: no worse than the unpatched model in bf16, but for chance."""
    model = tiny_model(gate).train()
    exact = run_case(model, inputs_of(gate, BATCH, model))
    plain = tiny_model(gate).train()
    # FSDP2's policy makes everything bf16, as bf16 weights do
    alone_how = "weights" if how == "policy" else how
    alone, alone_grads = narrow(plain, inputs_of(gate, BATCH, plain), alone_how, patched=False)
    outcomes = ranks(2).run(low_precision, gate, how, timeout=PATIENCE)
    assert all(loss == outcomes[0][0] for loss, _ in outcomes)
    expected = {name: grad for name, grad in exact.grads.items() if grad is not None}
    assert_as_near_as_unpatched(outcomes[0][1], alone_grads, expected)
    assert abs(outcomes[0][0] - exact.loss) < 0.02 * exact.loss and abs(alone - exact.loss) < 0.02 * exact.loss


def kept_bytes(rank: int, world: int, gate: str | None, frames: int, checkpointing: bool, recompute: bool) -> list[int]:
    """Bytes that each hyper layer's attention keeps for backward, beyond the features that all layers share."""
    model = tiny_model(gate).train()
    freeze(model, but="vision_model")  # the tower keeps something for every frame, as it must
    if checkpointing:
        model.gradient_checkpointing_enable()
    patch_model(model, recompute_visual=recompute)
    ids = tiny_text(frames, length=40)
    kept: list[int] = []
    shared: set[int] = set()

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if kept and storage.data_ptr() not in shared:
            kept[-1] += x.numel() * x.element_size()
        return x

    def enter(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        shared.add(kwargs["seqpar"].frames.visual.features.untyped_storage().data_ptr())
        shared.update(weight.untyped_storage().data_ptr() for weight in model.parameters())
        kept.append(0)

    for number in model.config.hyper_layers:
        model.language_model.model.layers[number - 1].register_forward_pre_hook(enter, with_kwargs=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, tiny_frames(frames), labels=ids).loss
    sizes = list(kept)
    kept.clear()
    loss.backward()
    return sizes


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_what_a_layer_keeps_does_not_grow_with_the_frames(gate: str | None, checkpointing: bool) -> None:
    few, many = (ranks(2).run(kept_bytes, gate, frames, checkpointing, True, timeout=PATIENCE) for frames in (8, 32))
    assert few == many and all(size > 0 for sizes in few for size in sizes[:1])


def test_without_recomputation_it_grows() -> None:
    """So the measurement above would see it."""
    few, many = (ranks(2).run(kept_bytes, "per_head", frames, False, False, timeout=PATIENCE) for frames in (8, 32))
    assert all(b > a for ranks_ in zip(few, many, strict=True) for a, b in zip(*ranks_, strict=True))


def other_weights(rank: int, world: int, when: str) -> None:
    """Ranks whose weights differ: from the start, or since the second of three passes."""
    model = tiny_model("per_head")
    patch_model(model)
    inputs = inputs_of("per_head", BATCH, model)
    for step in range(3):
        if rank == 1 and when == ("at first", "later")[step == 1]:
            with torch.no_grad():
                model.language_model.lm_head.weight[0] += 1.0
        model(**inputs)


@pytest.mark.parametrize("when", ["at first", "later"])
def test_ranks_with_other_weights(when: str) -> None:
    errors = ranks(2).errors(other_weights, when, timeout=PATIENCE)
    assert all("checksum of weights: rank 0 has" in str(error) for error in errors), errors


def own_loss(rank: int, world: int) -> None:
    model = tiny_model("per_head")
    model.loss_function = lambda **_: torch.zeros(())
    patch_model(model)
    model(**inputs_of("per_head", BATCH, model))


def test_a_loss_of_the_models_own_is_refused_where_text_is_dealt() -> None:
    errors = ranks(2).errors(own_loss, timeout=PATIENCE)
    assert all('Patch with self_attention="local"' in str(error) for error in errors), errors
    model = tiny_model("per_head")
    inputs = inputs_of("per_head", BATCH, model)
    # of unshifted labels, as a loss that does its own shifting takes them
    model.loss_function = lambda logits, labels, **_: logits[:, :-1].gather(2, labels[:, 1:, None] % 7).mean()
    expected = model(**inputs).loss.item()
    patch_model(model)
    assert model(**inputs).loss.item() == pytest.approx(expected, rel=1e-5)
