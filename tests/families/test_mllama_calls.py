"""Layer: gloo ranks. Llama 3.2 Vision patched: what is projected how often, conversations, undoing, bad inputs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PATIENCE, TOLERANCE, settings
from tiny_mllama import PATCHES, TILES, Case, fresh_model, inputs_of, local_frames, model_of, tiny_config, tiny_mllama
from transformers import MllamaForConditionalGeneration

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.errors import AdapterError
from outcomes import error
from ranks import ranks

FOUR = Case(images=((3, 1, 2, 3),), labels=False)
UNEVEN = Case(images=((2, 3, 1), (1,)), labels=False)


def cross_attentions(model: Any) -> list[Any]:
    return [layer.cross_attn for layer in model.model.language_model.layers if hasattr(layer, "cross_attn")]


def counted(model: Any, inputs: dict[str, Any], **given: Any) -> dict[str, list[int]]:
    """Visual tokens that go through the k_proj of each layer, and images through the tower, while tokens are made."""
    found: dict[str, list[int]] = {"keys": [], "images": []}
    hooks = [
        attention.k_proj.register_forward_hook(lambda _, args, out: found["keys"].append(out[..., 0].numel()))
        for attention in cross_attentions(model)
    ]
    tower = model.model.vision_model.transformer
    hooks.append(tower.register_forward_pre_hook(lambda _, args: found["images"].append(args[0].shape[0])))
    model.generate(**inputs, **settings(max_new_tokens=8, **given))
    for hook in hooks:
        hook.remove()
    return found


def counted_rank(rank: int, world: int, given: dict[str, Any], own: bool) -> dict[str, list[int]]:
    model = patch_model(model_of(FOUR))
    try:
        inputs = inputs_of(FOUR, model)
        return counted(model, local_frames(inputs) if own else inputs, **given)
    finally:
        unpatch_model(model)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("given", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_an_image_is_encoded_and_projected_once_where_it_is(given: dict[str, Any], own: bool) -> None:
    """Four images, dealt 2, 1, 1; two layers; a sample's beams share them."""
    found = ranks(3).run(counted_rank, given, own, timeout=PATIENCE)
    image = TILES * PATCHES
    assert [x["keys"] for x in found] == [[2 * image] * 2, [image] * 2, [image] * 2]
    assert [x["images"] for x in found] == [[2], [1], [1]]


def conversation(model: Any) -> list[torch.Tensor]:
    """Two turns: the second goes on with the cache of the first and passes no images."""
    inputs = inputs_of(UNEVEN, model)
    first = model.generate(**inputs, **settings(return_dict_in_generate=True))
    asked = torch.cat([first.sequences, torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]])], dim=1)
    mask = inputs["cross_attention_mask"]
    mask = torch.cat([mask, mask[:, -1:].expand(-1, asked.shape[1] - mask.shape[1], -1, -1)], dim=1)
    second = model.generate(asked, past_key_values=first.past_key_values, cross_attention_mask=mask, **settings())
    return [first.sequences, second]


def conversation_rank(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    model = patch_model(model_of(UNEVEN), **options)
    try:
        return conversation(model)
    finally:
        unpatch_model(model)


@pytest.mark.parametrize("options", [{}, {"shard_prompt_from": 2}], ids=str)
def test_a_conversation_goes_on_with_the_cache(options: dict[str, Any]) -> None:
    expected = conversation(model_of(UNEVEN))
    for found in ranks(3).run(conversation_rank, options, timeout=PATIENCE):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def by_hand(model: Any) -> list[torch.Tensor]:
    """A prompt, then two tokens and one, with a mask of the whole text, of which each pass has some rows."""
    inputs, length = inputs_of(UNEVEN, model), UNEVEN.length + 4
    generator = torch.Generator().manual_seed(5)
    mask = (torch.rand(2, length, 3, TILES, generator=generator) < 0.4).long()
    mask[:, [1, UNEVEN.length + 1, length - 2]] = 0  # rows that see nothing
    ids = torch.randint(3, 90, (2, 3), generator=generator)
    found, cache = [], None
    with torch.no_grad():
        for part in (inputs, {"input_ids": ids[:, :2]}, {"input_ids": ids[:, 2:]}):
            out = model(**part | {"cross_attention_mask": mask}, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    return found


def by_hand_rank(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    model = patch_model(model_of(UNEVEN), **options)
    try:
        return by_hand(model)
    finally:
        unpatch_model(model)


@pytest.mark.parametrize("options", [{}, {"shard_prompt_from": 2}], ids=str)
def test_passes_by_hand_with_a_mask_of_the_whole_text(options: dict[str, Any]) -> None:
    expected = by_hand(model_of(UNEVEN))
    for found in ranks(3).run(by_hand_rank, options, timeout=PATIENCE):
        assert all(error(a, b) < TOLERANCE for a, b in zip(found, expected, strict=True))


def traces(model: Any) -> dict[str, Any]:
    """Everything that patching could leave behind: every attribute of every module, by identity."""
    return {
        f"{path}.{name}": (id(value), list(value) if isinstance(value, dict) else None)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    } | {path: type(module) for path, module in model.named_modules()}


def test_unpatching_leaves_no_trace() -> None:
    model = tiny_mllama()
    inputs = inputs_of(UNEVEN, model)
    logits = model(**inputs).logits
    before, configured = traces(model), repr(model.config)
    patch_model(model, "ring")
    model(**inputs, labels=inputs["input_ids"].clamp(max=9)).loss.backward()
    model.generate(**inputs, **settings(max_new_tokens=2))
    model.zero_grad()
    unpatch_model(model)
    assert traces(model) == before and repr(model.config) == configured
    assert torch.equal(model(**inputs).logits, logits)


def test_saving_patched_and_loading_unpatched(tmp_path: Path) -> None:
    model = tiny_mllama()
    inputs = inputs_of(UNEVEN, model)
    logits, keys = model(**inputs).logits, list(model.state_dict())
    patch_model(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = MllamaForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded(**inputs).logits, logits)


def test_parts_of_the_model_called_by_themselves_are_unpatched() -> None:
    model = tiny_mllama()
    inputs = inputs_of(UNEVEN, model)
    before = model.model(**inputs).last_hidden_state
    patch_model(model)
    assert torch.equal(model.model(**inputs).last_hidden_state, before)


@pytest.mark.parametrize(("implementation", "told"), [("eager", 0), ("sdpa", 1)])
def test_a_missing_mask_is_told_once(implementation: str, told: int, caplog: pytest.LogCaptureFixture) -> None:
    """Where transformers goes wrong without one."""
    model = tiny_mllama()
    model.set_attn_implementation(implementation)
    patch_model(model)
    inputs = inputs_of(Case(images=((2,),), mask="none", labels=False), tiny_mllama())
    with caplog.at_level(logging.WARNING, logger="mllm_seqpar"), torch.no_grad():
        for _ in range(2):
            model(**inputs)
    assert sum("cross_attention_mask is missing" in record.message for record in caplog.records) == told


ONE_IMAGE = {"aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long)}
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "mask of another text": (
        {"cross_attention_mask": torch.ones(1, 4, 4, TILES)},
        r"cross_attention_mask has shape \(1, 4, 4, 3\); expected \(batch, tokens, images, tiles\): 1 samples, 11 tok",
    ),
    "mask of other images": ({"cross_attention_mask": torch.ones(1, 11, 3, TILES)}, "12 tiles in all images of a sam"),
    "mask without tiles": ({"cross_attention_mask": torch.ones(1, 11, 4)}, r"has shape \(1, 11, 4\); expected"),
    "mask of other samples": ({"cross_attention_mask": torch.ones(2, 11, 4, TILES)}, r"has shape \(2, 11, 4, 3\)"),
    "no aspect ratios": (
        {"aspect_ratio_ids": None, "aspect_ratio_mask": None},
        "given without aspect_ratio_ids, aspect_ratio_mask; pass what the processor returns",
    ),
    "aspect ratios of another number of images": (ONE_IMAGE, r"\[\(4, 3, 3, 28, 28\), \(1,\), \(4, 3\)\] by images"),
    "other tiles": ({"pixel_values": torch.zeros(1, 4, 2, 3, 28, 28)}, r"expected \(batch, images, 3 tiles, channels"),
    "no dimension of images": ({"pixel_values": torch.zeros(4, 3, 3, 28, 28)}, r"\[\(12, 3, 28, 28\), \(4,\), "),
    "pixels and states": (
        {"cross_attention_states": torch.zeros(12, PATCHES, 64)},
        "pass either pixel_values or cross_attention_states, not both",
    ),
    "states of another width": (
        {"pixel_values": None, "cross_attention_states": torch.zeros(12, PATCHES, 96)},
        r"cross_attention_states has shape \(12, 5, 96\); expected \(batch x images x tiles, patches, 64\) with 5",
    ),
    "states of part of a tile": (
        {"pixel_values": None, "cross_attention_states": torch.zeros(1, 12 * PATCHES - 1, 64)},
        "with 5 patches a tile, as cross_attention_mask has it",
    ),
    "attention weights": ({"output_attentions": True}, "output_attentions=True: attention weights do not exist"),
}


def errors_of_all(rank: int, world: int) -> dict[str, str]:
    """One rank's arguments are wrong; all must fail, and none wait."""
    model, found = model_of(FOUR), {}
    patch_model(model)
    for name, (changed, _) in ERRORS.items():
        try:
            model(**inputs_of(FOUR, model) | (changed if rank == 0 else {}))
        except Exception as caught:
            found[name] = f"{type(caught).__name__}: {caught}"
    unpatch_model(model)
    return found


def test_bad_inputs() -> None:
    first, other = ranks(2).run(errors_of_all, timeout=PATIENCE)
    for name, (_, message) in ERRORS.items():
        with pytest.raises(ValueError, match=message):
            raise ValueError(first.get(name, "no error"))
        assert "rank 0 of the group failed while checking its arguments" in other[name], (name, other[name])


def test_images_of_samples_that_do_not_divide() -> None:
    model = patch_model(fresh_model())
    inputs = inputs_of(UNEVEN, model) | {"cross_attention_mask": None}
    own = local_frames(inputs_of(FOUR, model))
    images = {name: own[name][:3] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    shard = type(own["visual_shard"])(0, 3, 3)
    with pytest.raises(ValueError, match="9 tiles of 2 samples were passed with a batch of 2; every sample needs as"):
        model(**inputs | images | {"visual_shard": shard})


def test_dropout_is_refused_where_it_would_differ() -> None:
    model = fresh_model()
    for attention in cross_attentions(model):
        attention.dropout = 0.1
    patch_model(model)
    with pytest.raises(ValueError, match="dropout on attention weights is not supported"):
        model(**inputs_of(UNEVEN, model))


def test_a_first_layer_that_looks_at_images_is_refused() -> None:
    model = MllamaForConditionalGeneration(tiny_config(cross_attention_layers=[0, 3]))
    with pytest.raises(AdapterError, match=r"cross_attention_layers is \[0, 3\]: transformers counts cached tokens by"):
        patch_model(model)


def test_layers_that_are_not_what_the_config_says() -> None:
    model = tiny_mllama()
    model.model.language_model.cross_attention_layers = [1]
    with pytest.raises(
        AdapterError, match=r"layer 3 is MllamaCrossAttentionDecoderLayer, but cross_attention_layers is"
    ):
        patch_model(model)
