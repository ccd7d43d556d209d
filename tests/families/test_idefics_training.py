"""Layer: gloo ranks. Patched IDEFICS under FSDP2, with checkpointing, LoRA and frozen parts; undoing; errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import PATIENCE, TOLERANCE, settings
from tiny_idefics import ONE, RESAMPLER, Case, fresh_model, inputs_of, local_frames, model_of

from mllm_seqpar import patch_model, unpatch_model
from outcomes import error
from ranks import ranks
from tolerances import assert_as_near_as_unpatched
from training import check_fsdp, check_lora

FAMILY = "tiny_idefics"
VIDEO, OTHER = Case(images=(3, 2)), Case(images=(1,), length=9)


@pytest.mark.parametrize(("world", "checkpointing"), [(2, True), (3, False)])
def test_fsdp2(world: int, checkpointing: bool) -> None:
    check_fsdp(FAMILY, [[VIDEO, OTHER, VIDEO]], world, checkpointing)


def test_two_groups_under_one_fsdp() -> None:
    check_fsdp(FAMILY, [[VIDEO, OTHER], [OTHER, VIDEO]], 4)


@pytest.mark.parametrize(("world", "checkpointing"), [(1, False), (3, True)])
def test_lora(world: int, checkpointing: bool) -> None:
    check_lora(FAMILY, VIDEO, world, checkpointing)


def test_unpatching_gives_the_same_bits() -> None:
    model, case = model_of(ONE), ONE
    inputs = inputs_of(case, model)
    before, modules = model(**inputs).logits, {name: dict(vars(m)) for name, m in model.named_modules()}
    patch_model(model)
    model(**inputs)
    model.generate(**inputs, **settings(max_new_tokens=2))
    unpatch_model(model)
    for name, module in model.named_modules():
        assert vars(module).keys() == modules[name].keys(), name
        assert all(vars(module)[key] is value for key, value in modules[name].items()), name
    assert torch.equal(model(**inputs).logits, before)


def projected(rank: int, world: int) -> list[int]:
    """Image tokens that go through the k_proj of each block while 8 tokens are generated."""
    model, counts = model_of(ONE), []
    for block in model.model.gated_cross_attn_layers:
        block.cross_attn.k_proj.register_forward_hook(lambda _, args, out: counts.append(out[..., 0].numel()))
    patch_model(model)
    try:
        model.generate(**inputs_of(ONE, model), **settings(max_new_tokens=8))
    finally:
        unpatch_model(model)
        for block in model.model.gated_cross_attn_layers:
            block.cross_attn.k_proj._forward_hooks.clear()
    return counts


def test_keys_are_projected_once_per_prompt_where_the_images_are() -> None:
    """4 images of 5 tokens, dealt 2, 1, 1; two blocks."""
    assert ranks(3).run(projected, timeout=PATIENCE) == [[10, 10], [5, 5], [5, 5]]


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": (
        {"image_attention_mask": None},
        r"image_attention_mask: expected \(samples, text tokens, .* got nothing",
    ),
    "mask of another text": ({"image_attention_mask": torch.ones(1, 4, 4)}, r"got \(1, 4, 4\)"),
    "mask of other images": ({"image_attention_mask": torch.ones(1, 11, 3)}, "whose mask speaks of 3 each"),
    "no images": ({"pixel_values": None}, "IDEFICS needs images: pass one of pixel_values"),
    "another size": ({"pixel_values": torch.zeros(1, 4, 3, 24, 24)}, "pass interpolate_pos_encoding=True"),
    "latents without a resampler": (
        {"pixel_values": None, "perceiver_embeddings": torch.zeros(1, 4, 3, 24)},
        "perceiver_embeddings were passed to a model without resampler",
    ),
    "attention weights": ({"output_attentions": True}, "output_attentions=True: attention weights do not exist"),
}


def errors_of_all(rank: int, world: int) -> dict[str, str]:
    model, found = model_of(ONE), {}
    patch_model(model)
    for name, (changed, _) in ERRORS.items():
        try:
            model(**inputs_of(ONE, model) | changed)
        except Exception as caught:
            found[name] = f"{type(caught).__name__}: {caught}"
    unpatch_model(model)
    return found


def test_bad_inputs() -> None:
    for found in ranks(2).run(errors_of_all, timeout=PATIENCE):
        for name, (_, message) in ERRORS.items():
            with pytest.raises(ValueError, match=message):
                raise ValueError(found.get(name, "no error"))


def cache_with_gradients(rank: int, world: int) -> None:
    model = model_of(ONE)
    patch_model(model)
    try:
        model(**local_frames(inputs_of(ONE, model)), use_cache=True)
    finally:
        unpatch_model(model)


def test_a_cache_with_gradients() -> None:
    for found in ranks(2).errors(cache_with_gradients, timeout=PATIENCE):
        assert "use_cache: a pass with a cache has no backward" in str(found)


def test_dropout_is_refused_where_it_would_differ() -> None:
    model = fresh_model()
    for block in model.model.gated_cross_attn_layers:
        block.cross_attn.dropout = 0.1
    patch_model(model)
    with pytest.raises(ValueError, match="dropout on attention weights is not supported"):
        model(**inputs_of(VIDEO, model))


def test_reentrant_checkpointing_is_refused() -> None:
    model = fresh_model()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    patch_model(model)
    with pytest.raises(ValueError, match="use_reentrant=True cannot share the visual features"):
        model(**inputs_of(VIDEO, model))


def test_another_attention_is_refused_while_patched() -> None:
    model = model_of(ONE)
    patch_model(model)
    try:
        with pytest.raises(ValueError, match="set_attn_implementation: this model is patched"):
            model.set_attn_implementation("eager")
    finally:
        unpatch_model(model)
    model.set_attn_implementation("sdpa")


def test_hidden_states_of_chosen_layers() -> None:
    model, inputs = model_of(ONE), inputs_of(ONE, model_of(ONE))
    expected = model(**inputs, output_hidden_states=[0, 2]).hidden_states
    patch_model(model)
    try:
        found = model(**inputs, output_hidden_states=[0, 2]).hidden_states
    finally:
        unpatch_model(model)
    assert [state is None for state in found] == [state is None for state in expected]
    assert torch.allclose(found[2], expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.rounding
def test_features_in_another_dtype_than_the_model() -> None:
    case = Case(images=(2, 1), features="encoder", model=RESAMPLER, labels=False)
    model = copy.deepcopy(model_of(case)).bfloat16()
    inputs = inputs_of(case, model)
    exact, unpatched = model_of(case)(**inputs).logits, model(**inputs).logits
    found = patch_model(model)(**inputs).logits
    assert_as_near_as_unpatched({"logits": found}, {"logits": unpatched}, {"logits": exact})


def test_tuples_by_the_config() -> None:
    model = fresh_model()
    inputs = inputs_of(Case(images=(4,), labels=False), model)
    model.config.return_dict = False
    expected = model(**inputs)
    found = patch_model(model)(**inputs)
    assert isinstance(found, tuple) and error(found[0], expected[0]) < TOLERANCE
