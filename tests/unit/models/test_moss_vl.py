"""Layer: one process. The native MOSS-VL against dense attention, and its caches, configuration and weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageTextToText

from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.errors import ConfigError, MaskError, SeqParError, ShapeError
from mllm_seqpar.models.moss_vl import MossVLConfig, MossVLForConditionalGeneration
from moss_vl_reference import positions_of, sample_logits
from tiny_models.moss_vl import IMAGE, Case, inputs_of, tiny_config, tiny_model, with_blank_images

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CASES = {
    "text only": Case(frames=((),), length=8),
    "one image": Case(frames=(((4, 4),),), length=8),
    "smallest frames": Case(frames=(((2, 2), (3, 2, 2)),), length=12),
    "long frames": Case(frames=(((2, 38), (40, 2), (2, 2)),), length=11),
    "two images of different sizes": Case(frames=(((4, 6), (8, 4)),), length=12),
    "image, video, image": Case(frames=(((4, 4), (3, 6, 4), (2, 8)),), length=17),
    "left padding": Case(frames=(((4, 4),), ((2, 6, 4), (2, 8))), length=14, padding="left"),
    "right padding": Case(frames=(((4, 4),), ((2, 6, 4), (2, 8))), length=14, padding="right"),
    "text sample first": Case(frames=((), ((2, 6, 4), (2, 8))), length=12),
    "text sample last": Case(frames=(((2, 6, 4), (2, 8)), ()), length=12, padding="left"),
    "text sample in the middle": Case(frames=(((4, 4),), (), ((2, 6, 4),)), length=12, padding="right"),
}
MIXED = replace(CASES["left padding"], labels=None)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def logits_of_samples(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the reference's logits of each sample, without padding."""
    grid = inputs.get("grid_thw", torch.zeros(0, 3, dtype=torch.long))
    media = inputs.get("media_nums_per_sample", [0] * len(inputs["input_ids"]))
    pixels, found = inputs.get("pixel_values", torch.zeros(0, 1)), []
    for ids, mask, grids in zip(inputs["input_ids"], _mask(inputs), grid.split(media), strict=True):
        own, pixels = pixels.tensor_split([int(grids.prod(1).sum())])
        frames = [(h, w) for t, h, w in grids.tolist() for _ in range(t)]
        found.append(sample_logits(model, ids[mask], own, frames))
    return found


def _mask(inputs: dict[str, Any]) -> Tensor:
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_dense_attention(model: Any, name: str) -> None:
    inputs = inputs_of(CASES[name], model)
    labels, mask = inputs["labels"], _mask(inputs)
    out = model(**inputs, use_cache=False)
    expected = logits_of_samples(model, inputs)
    for logits, own, real in zip(out.logits, expected, mask, strict=True):
        torch.testing.assert_close(logits[real], own, atol=1e-5, rtol=1e-4)
    targets = [row[real] for row, real in zip(labels, mask, strict=True)]
    # The first token of a text has no token before it, except in a padded row.
    pairs = [(x[:-1], y[1:]) for x, y in zip(expected, targets, strict=True)]
    loss = F.cross_entropy(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
    starts = mask & ~F.pad(mask, (1, 0))[:, :-1]
    ours = model(**inputs | {"labels": labels.masked_fill(starts, -100)}, use_cache=False).loss
    assert abs(float((ours - loss).detach())) < 1e-5
    names, weights = zip(*model.named_parameters(), strict=True)
    grads = [torch.autograd.grad(x, weights, allow_unused=True, retain_graph=True) for x in (ours, loss)]
    for key, found, exact in zip(names, *grads, strict=True):
        assert (found is None) == (exact is None), key
        if found is not None:
            torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-3, msg=key)


def test_positions_grow_by_the_longer_side_of_each_frame() -> None:
    text, visual = positions_of([7, IMAGE, 7, 7], IMAGE, [(2, 3)])
    assert text[0].tolist() == [0, 4, 5, 6]
    assert visual.T.tolist() == [[1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3], [4, 4, 4]]


@pytest.mark.parametrize("places", [[0, 1, 6], [5, 6, 7], [0, 7], [3, 4, 5]])
def test_frames_may_begin_end_and_follow_one_another_in_a_text(model: Any, places: list[int]) -> None:
    inputs = inputs_of(Case(frames=(tuple([(2, 2), (4, 6), (6, 2)][: len(places)]),), length=8, labels=None), model)
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 7)
    ids[0, places] = IMAGE
    counts = (ids == IMAGE).long().cumsum(1)
    given = inputs | {"input_ids": ids, "cross_attention_mask": counts}
    torch.testing.assert_close(
        model(**given).logits, torch.stack(logits_of_samples(model, given)), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["text only", "text sample first", "text sample last", "text sample in the middle"])
def test_blank_images_of_texts_without_media_have_no_effect(model: Any, name: str) -> None:
    inputs = inputs_of(replace(CASES[name], labels=None), model)
    given, real = with_blank_images(inputs, model), _mask(inputs)
    expected, found = (model(**x, use_cache=False).logits for x in (inputs, given))
    torch.testing.assert_close(found[real], expected[real])
    options = GREEDY | {"suppress_tokens": [IMAGE]}
    if "padding" not in name and inputs.get("attention_mask", torch.ones(1, 1))[:, -1].all():
        assert torch.equal(*(model.generate(**x, **options) for x in (inputs, given)))


def test_padding_of_the_visual_sequences_has_no_effect() -> None:
    inputs, found = inputs_of(MIXED, tiny_model()), []
    for multiple in (1, 8):
        config = tiny_config()
        config.vision_seq_pad_multiple = multiple
        model = MossVLForConditionalGeneration(config).eval()
        model.load_state_dict(tiny_model().state_dict())
        found.append(model(**inputs, use_cache=False).logits)
    assert torch.equal(*found)


class TestGeneration:
    @pytest.mark.parametrize("name", [name for name in CASES if name not in ("right padding",)])
    def test_decoded_tokens_are_those_of_one_pass(self, model: Any, name: str) -> None:
        inputs = inputs_of(replace(CASES[name], labels=None, padding=CASES[name].padding and "left"), model)
        found = model.generate(**inputs, **GREEDY, suppress_tokens=[IMAGE])
        ids = inputs["input_ids"]
        for _ in range(GREEDY["max_new_tokens"]):
            mask = F.pad(_mask(inputs), (0, ids.shape[1] - inputs["input_ids"].shape[1]), value=True)
            given = inputs | {"input_ids": ids, "attention_mask": mask.long()}
            logits = torch.stack([x[-1] for x in logits_of_samples(model, given)])
            logits[:, IMAGE] = -torch.inf
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        assert torch.equal(found, ids)

    @pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {}])
    def test_tokens_with_and_without_cache_are_equal(self, model: Any, options: dict[str, Any]) -> None:
        inputs = inputs_of(MIXED, model)
        cached, uncached = (model.generate(**inputs, **GREEDY, **options, use_cache=x) for x in (True, False))
        assert torch.equal(cached, uncached)

    def test_beams_of_one_sample_need_no_number_of_media(self, model: Any) -> None:
        inputs = inputs_of(Case(labels=None), model)
        counted = model.generate(**inputs, **GREEDY, num_beams=2)
        del inputs["media_nums_per_sample"]
        assert torch.equal(model.generate(**inputs, **GREEDY, num_beams=2), counted)

    def test_later_prompts_have_nothing_of_earlier_ones(self, model: Any) -> None:
        text, video = inputs_of(Case(frames=((),), length=6, labels=None), model), inputs_of(Case(labels=None), model)
        alone = [tiny_model().generate(**given, **GREEDY) for given in (text, video)]
        for given, expected in ((video, alone[1]), (text, alone[0]), (video, alone[1])):
            assert torch.equal(model.generate(**given, **GREEDY), expected)

    def test_conversation_continues_over_its_cache(self, model: Any) -> None:
        inputs, more = inputs_of(MIXED, model), torch.tensor([[5, 6, 7], [8, 9, 10]])
        cache = cache_of(model(**inputs, use_cache=True))
        found = model(input_ids=more, attention_mask=_after(inputs, 3), **cache_argument(cache)).logits
        whole = {"input_ids": torch.cat([inputs["input_ids"], more], 1), "attention_mask": _after(inputs, 3)}
        torch.testing.assert_close(found, model(**inputs | whole).logits[:, -3:], atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("kept", [4, 9, 13])
    def test_cache_may_be_cropped_before_a_frame(self, model: Any, kept: int) -> None:
        inputs, more = inputs_of(Case(frames=(((3, 4, 6), (6, 4)),), length=15, labels=None), model), [[5, 6, 7]]
        assert 0 < int((inputs["input_ids"][0, :9] == IMAGE).sum()) < 4
        cache = cache_of(model(**inputs, use_cache=True))
        cache.crop(kept - 15)
        found = model(input_ids=torch.tensor(more), **cache_argument(cache)).logits
        ids = torch.cat([inputs["input_ids"][:, :kept], torch.tensor(more)], 1)
        frames = [(4, 6)] * 3 + [(6, 4)]
        count = int((ids == IMAGE).sum())
        rows = sum(h * w for h, w in frames[:count])
        expected = sample_logits(model, ids[0], inputs["pixel_values"][:rows], frames[:count])
        torch.testing.assert_close(found[0], expected[-3:], atol=1e-5, rtol=1e-4)

    def test_first_frames_may_come_with_a_later_turn(self, model: Any) -> None:
        inputs = inputs_of(Case(frames=(((3, 4, 6), (6, 4)),), length=15, labels=None), model)
        before = torch.tensor([[4, 5, 6, 7]])
        cache = cache_of(model(input_ids=before, use_cache=True))
        later = inputs | {"input_ids": inputs["input_ids"]}
        found = model(**later, **cache_argument(cache)).logits
        ids = torch.cat([before, inputs["input_ids"]], 1)
        expected = sample_logits(model, ids[0], inputs["pixel_values"], [(4, 6)] * 3 + [(6, 4)])
        torch.testing.assert_close(found[0], expected[4:], atol=1e-5, rtol=1e-4)
        more = torch.tensor([[8, 9]])
        found = model(input_ids=more, **cache_argument(cache)).logits
        ids = torch.cat([ids, more], 1)
        expected = sample_logits(model, ids[0], inputs["pixel_values"], [(4, 6)] * 3 + [(6, 4)])
        torch.testing.assert_close(found[0], expected[-2:], atol=1e-5, rtol=1e-4)
        found = model(**later, **cache_argument(cache)).logits  # the same frames, which are shown once more
        ids, patches = torch.cat([ids, inputs["input_ids"]], 1), torch.cat([inputs["pixel_values"]] * 2)
        expected = sample_logits(model, ids[0], patches, ([(4, 6)] * 3 + [(6, 4)]) * 2)
        torch.testing.assert_close(found[0], expected[-15:], atol=1e-5, rtol=1e-4)


def _after(inputs: dict[str, Any], tokens: int) -> Tensor:
    return F.pad(inputs["attention_mask"], (0, tokens), value=1)


class TestInputs:
    def test_numbers_of_frames_are_a_mask_too(self, model: Any) -> None:
        for case in (MIXED, replace(MIXED, padding="right")):
            found = [model(**inputs_of(replace(case, mask=mask), model)).logits for mask in ("processor", "counts")]
            assert torch.equal(*found)

    def test_without_a_mask_every_row_attends_to_all_frames(self, model: Any) -> None:
        inputs = inputs_of(Case(labels=None), model)
        whole = inputs | {"cross_attention_mask": torch.full_like(inputs["input_ids"], 4)}
        del inputs["cross_attention_mask"]
        assert torch.equal(model(**inputs).logits, model(**whole).logits)

    def test_stated_positions_are_those_of_the_text(self, model: Any) -> None:
        inputs = inputs_of(Case(labels=None), model)
        mask, grids = inputs["cross_attention_mask"], torch.tensor([[4, 6]] * 3 + [[6, 4]])
        layout = model.model.layout(inputs["input_ids"], grids, [4], cross_attention_mask=mask)
        expected = model(**inputs).logits
        assert torch.equal(model(**inputs, position_ids=layout.positions).logits, expected)
        assert not torch.equal(model(**inputs, position_ids=layout.positions * 2).logits, expected)

    def test_packed_positions_are_refused(self, model: Any) -> None:
        packed = torch.cat([torch.arange(5), torch.arange(4)])[None]
        with pytest.raises(ShapeError, match="begin again within a text, as those of packed sequences"):
            model(torch.arange(5, 14)[None], position_ids=packed)

    def test_embeddings_take_the_place_of_token_ids(self, model: Any) -> None:
        inputs = inputs_of(MIXED, model)
        embedded = inputs_of(replace(MIXED, embeds=True), model)
        torch.testing.assert_close(model(**embedded).logits, model(**inputs).logits)
        del embedded["cross_attention_mask"]
        with pytest.raises(ShapeError, match="places of the frames in the text are unknown"):
            model(**embedded)

    def test_features_take_the_place_of_pixels(self, model: Any) -> None:
        found = [model(**inputs_of(replace(MIXED, features=x), model)).logits for x in (None, "embeddings")]
        torch.testing.assert_close(*found)
        inputs = inputs_of(replace(MIXED, features="embeddings"), model)
        with pytest.raises(ShapeError, match="18 visual tokens were passed, and grid_thw means 24"):
            model(**inputs | {"visual_embeds": inputs["visual_embeds"][:18]})

    def test_media_may_be_encoded_in_groups(self, model: Any) -> None:
        inputs = inputs_of(MIXED, model)
        torch.testing.assert_close(model(**inputs, vision_chunked_length=1).logits, model(**inputs).logits)

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            ({"media_nums_per_sample": [1, 1]}, ShapeError, r"media_nums_per_sample is \[1, 1\] for 3 rows"),
            ({"media_nums_per_sample": None}, ShapeError, "media_nums_per_sample is missing for a batch of 2"),
            ({"media_nums_per_sample": [2, 1]}, ShapeError, r"frames \[3, 1\] were passed"),
            ({"grid_thw": None}, ShapeError, "frames were passed without grid_thw"),
            ({"cross_attention_mask": torch.zeros(2, 14)}, MaskError, "has shape .* and dtype torch.float32; expected"),
            (
                {"cross_attention_mask": torch.zeros(3, 14).long()},
                MaskError,
                "has 3 samples and the text has 2",
            ),
            ({"cross_attention_mask": torch.zeros(2, 20).long()}, MaskError, "has 20 rows for a text of 14"),
            ({"pixel_values": None, "grid_thw": None, "media_nums_per_sample": None}, ShapeError, "needs a frame"),
        ],
    )
    def test_inputs_that_do_not_fit_are_refused(
        self, model: Any, changed: dict[str, Any], error: type[SeqParError], message: str
    ) -> None:
        inputs = inputs_of(MIXED, model)
        with pytest.raises(error, match=message):
            model(**inputs | changed)

    def test_mask_with_gaps_is_refused(self, model: Any) -> None:
        inputs = inputs_of(Case(labels=None), model)
        mask = inputs["cross_attention_mask"].clone()
        mask[0, 0, -1] = torch.tensor([False, True, False, True])
        with pytest.raises(MaskError, match="hidden ones between them"):
            model(**inputs | {"cross_attention_mask": mask})


PUBLISHED: dict[str, Any] = {
    "model_type": "moss_vl",
    "architectures": ["MossVLForConditionalGeneration"],
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "moss_vl_text",
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 48, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144},
        "cross_attention_layers": list(range(2, 48, 4)),
        **{"rope_theta": 5000000, "rms_norm_eps": 1e-06, "hidden_act": "silu", "attention_bias": False},
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
    "vision_config": {
        "model_type": "moss_vl_vision",
        **{"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16},
        **{"temporal_patch_size": 1, "spatial_merge_size": 2, "out_hidden_size": 4096, "in_channels": 3},
        **{"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
        "hidden_act": "gelu_pytorch_tanh",
    },
}


class TestConfiguration:
    def test_published_config_has_the_published_number_of_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
        config: Any = AutoConfig.from_pretrained(tmp_path)
        with torch.device("meta"):
            weights = MossVLForConditionalGeneration(config).state_dict()
        assert len(weights) == 895
        assert 2 * sum(x.numel() for x in weights.values()) == pytest.approx(22.67e9, rel=1e-3)
        assert sum(name.startswith("model.visual.") for name in weights) == 339
        assert {name: tuple(weights[name].shape) for name in SHAPES} == SHAPES
        assert config.text.rope_parameters["rope_theta"] == 5000000

    @pytest.mark.parametrize("part", ["text_config", "vision_config"])
    def test_sizes_are_never_filled_in(self, part: str, caplog: pytest.LogCaptureFixture) -> None:
        sizes = {"text_config": "num_key_value_heads", "vision_config": "out_hidden_size"}
        others = {"text_config": "rms_norm_eps", "vision_config": "patch_size"}
        for name, missing in (("size", sizes[part]), ("other", others[part])):
            given = {key: x for key, x in PUBLISHED[part].items() if key != missing}
            if name == "size":
                with pytest.raises(ConfigError, match=f"{part} does not state {missing}; state all sizes"):
                    MossVLConfig(**PUBLISHED | {part: given})
            else:
                MossVLConfig(**PUBLISHED | {part: given})
                assert f"{part} does not state {missing}; the published values are used" in caplog.text

    @pytest.mark.parametrize(
        ("part", "changed", "message"),
        [
            ("text_config", {"cross_attention_layers": [0, 2]}, "expected distinct numbers from 1 to 47"),
            ("text_config", {"cross_attention_layers": [2, 48]}, "expected distinct numbers from 1 to 47"),
            (
                "vision_config",
                {"deepstack_visual_indexes": [8, 27]},
                "distinct numbers from 0 to 26: blocks",
            ),
            ("vision_config", {"out_hidden_size": 3584}, "out_hidden_size is 3584 and hidden_size of the text is 4096"),
            ("vision_config", {"temporal_patch_size": 2}, "temporal_patch_size is 2; expected 1"),
            ("text_config", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ],
    )
    def test_contradictions_are_refused(self, part: str, changed: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            MossVLConfig(**PUBLISHED | {part: PUBLISHED[part] | changed})


SHAPES = {
    "model.visual.patch_embed.proj.weight": (1152, 3, 1, 16, 16),
    "model.visual.pos_embed.weight": (2304, 1152),
    "model.visual.merger.norms.3.bias": (1152,),
    "model.visual.merger.linear_fc1.weight": (18432, 18432),
    "model.visual.merger.linear_fc2.weight": (4096, 18432),
    "model.separator_token": (4096,),
    "model.language_model.layers.2.cross_attn.k_proj.weight": (1024, 4096),
    "model.language_model.layers.2.cross_attn.q_norm.weight": (128,),
    "model.language_model.layers.46.cross_attn_mlp_gate": (1,),
    "model.language_model.layers.47.self_attn.o_proj.weight": (4096, 4096),
    "lm_head.weight": (151936, 4096),
}


class TestWeights:
    def test_saved_model_loads_by_auto_classes_with_equal_weights(self, model: Any, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path)
        found: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
        assert type(found) is MossVLForConditionalGeneration
        assert all(torch.equal(x, found.state_dict()[name]) for name, x in model.state_dict().items())
        inputs = inputs_of(MIXED, model)
        assert torch.equal(found.eval()(**inputs).logits, model(**inputs).logits)

    def test_new_model_has_closed_gates(self) -> None:
        model = MossVLForConditionalGeneration(tiny_config())
        gates = [weight for name, weight in model.named_parameters() if name.endswith("gate") or "separator" in name]
        assert len(gates) == 5 and not any(bool(gate.any()) for gate in gates)

    def test_rotations_survive_loading(self, model: Any, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path)
        found = MossVLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
        for (name, ours), theirs in zip(found.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(ours.float(), theirs.float()), name


def test_gradient_checkpointing_changes_nothing(model: Any) -> None:
    inputs = inputs_of(replace(MIXED, labels="usual"), model)
    results = []
    for checkpointing in (False, True):
        trained = tiny_model().train()
        if checkpointing:
            with pytest.raises(ConfigError, match="use_reentrant is True"):
                trained.gradient_checkpointing_enable({"use_reentrant": True})
            trained.gradient_checkpointing_enable({"use_reentrant": False})
        trained(**inputs).loss.backward()
        results.append([weight.grad for weight in trained.parameters()])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_attention_implementation_can_be_set_later() -> None:
    model = tiny_model()
    inputs = inputs_of(Case(frames=(((2, 4, 6),), ((6, 2),)), padding="left"), model)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs).logits[real]
        model.set_attn_implementation("eager")
        assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {"eager"}
        torch.testing.assert_close(model(**inputs).logits[real], expected, atol=1e-5, rtol=1e-5)
