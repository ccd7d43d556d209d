"""Layer: one process. MOSS-Video-Preview: the published code's numbers, its weights' names, its config and loading."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import video_mllama_published as published
from mllm_seqpar import patch_model
from mllm_seqpar._compat import cache_argument, cache_name
from mllm_seqpar.errors import ConfigError, DataError, ShapeError
from mllm_seqpar.models.loading import load_config, load_model
from mllm_seqpar.models.video_mllama import VideoMllamaConfig, VideoMllamaForConditionalGeneration
from selections import slow_unless
from tiny_models.video_mllama import Case, inputs_of, tiny_config, tiny_model

NUMBERS = json.loads(Path(published.__file__).with_suffix(".json").read_text())
TOLERANCE = 2e-5


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a case, as a published file states it: with Mllama's `model_type`, and `rope_scaling`."""
    text = published.TEXT | {"rope_theta": published.THETA, "rope_scaling": published.ROPE}
    stated: dict[str, Any] = {"model_type": "mllama", "architectures": ["VideoMllamaForConditionalGeneration"]}
    stated |= {"text_config": text | {"model_type": "mllama_text_model"}, "image_token_index": published.IMAGE}
    return (
        stated | {"vision_config": published.VISION | {"model_type": "mllama_vision_model"}} | published.settings(case)
    )


def old_name(name: str) -> str:
    """Return the published name of a weight."""
    for new, old in (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")):
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name.removeprefix("model.")


def write(folder: Path, case: dict[str, Any]) -> None:
    """Write the model of a case as a published directory."""
    config = config_of(case)
    (folder / "config.json").write_text(json.dumps(config))
    fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = VideoMllamaForConditionalGeneration(VideoMllamaConfig(**fields))
    shapes = {old_name(name): x.shape for name, x in model.state_dict().items()}
    weights = {name: published.weight(name, shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "patched"),
    slow_unless(lambda row: not row[1] or row[0] == "average", itertools.product(published.CASES, (False, True))),
)
def test_published_directory_computes_what_the_published_code_computes(
    name: str, patched: bool, tmp_path: Path
) -> None:
    case, expected = published.CASES[name], NUMBERS[name]
    write(tmp_path, case)
    model: Any = load_model(str(tmp_path))
    model = patch_model(model) if patched else model
    inputs = published.inputs_of(case)
    found = model(**inputs)
    torch.testing.assert_close(
        published.shown_logits(found.logits, inputs), torch.tensor(expected["logits"]), atol=TOLERANCE, rtol=0
    )
    assert float(found.loss.detach()) == pytest.approx(expected["loss"], abs=TOLERANCE)
    found.loss.backward()
    gradients = {old_name(key): x.grad for key, x in model.named_parameters() if x.grad is not None}
    for key, product in expected["gradients"].items():
        norm = expected["gradient_norms"][key]
        assert float(gradients[key].double().norm()) == pytest.approx(norm, rel=1e-4, abs=1e-7), key
        # The product of a gradient with noise is as large as the gradient.
        assert published.shown_gradient(key, gradients[key]) == pytest.approx(product, abs=1e-4 * norm + 1e-7), key
    if "tokens" in expected:
        given = {key: x for key, x in inputs.items() if key != "labels"}
        tokens = model.generate(**given, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert tokens[:, -6:].tolist() == expected["tokens"]


def test_frames_of_a_later_pass_continue_the_positions_and_decoding_equals_one_pass() -> None:
    model = tiny_model()
    inputs = inputs_of(Case(frames=(4,), positions=False, labels=None), model)
    text, mask = inputs["input_ids"], inputs["cross_attention_mask"]
    mask[:, :, 0] = 1  # a row that sees no frame would attend to all of the call
    whole = model(**inputs).logits
    images = ("pixel_values", "aspect_ratio_ids")
    split = int(mask[0, :, 2].flatten().nonzero()[0])  # the token of the third frame
    first = {name: inputs[name][:, :2] for name in images}
    out = model(input_ids=text[:, :split], cross_attention_mask=mask[:, :split, :2], use_cache=True, **first)
    later = {name: inputs[name][:, 2:] for name in images}
    rows = slice(split, text.shape[1] - 1)
    kept: Any = cache_argument(getattr(out, cache_name()))
    more = model(input_ids=text[:, rows], cross_attention_mask=mask[:, rows], use_cache=True, **later, **kept)
    last = model(input_ids=text[:, -1:], cross_attention_mask=mask[:, -1:], use_cache=True, **kept)
    found = torch.cat([out.logits, more.logits, last.logits], dim=1)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_weights_are_loaded_strictly_and_saved_again(tmp_path: Path) -> None:
    case = published.CASES["channelFusion"]
    write(tmp_path, case)
    model: Any = VideoMllamaForConditionalGeneration.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "again")
    again = load_model(str(tmp_path / "again"))
    assert isinstance(again.config, VideoMllamaConfig)
    for name, x in model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name]), name
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("patch_merger.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (load_model, VideoMllamaForConditionalGeneration.from_pretrained):
        with pytest.raises(DataError, match=r"it lacks 1 tensor \(model.patch_merger.weight\)"):
            load(str(tmp_path))


def test_options_that_would_compute_something_else_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="use_reentrant is True; layers share the visual features"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConfigError, match="ignore_mismatched_sizes is True"):
        type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_auto_classes_load_a_saved_directory(tmp_path: Path) -> None:
    tiny_model(pool_mode="max").save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).pool_mode == "max"
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(model) is VideoMllamaForConditionalGeneration


def test_config_of_llama_3_2_vision_is_refused(tmp_path: Path) -> None:
    config = config_of(published.CASES["average"]) | {"architectures": ["MllamaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(load_config(str(tmp_path))).__name__ == "MllamaConfig"
    with pytest.raises(ConfigError, match="expected VideoMllamaForConditionalGeneration"):
        VideoMllamaConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pool_mode": "mean"}, "pool_mode is 'mean'"),
        ({"stride": None}, "stride is None"),
        ({"stride": 5}, "stride is 5; .* from 1 to the 4 of a side"),
    ],
)
def test_config_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**fields)


@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
def test_inputs_that_do_not_fit_are_refused(patched: bool) -> None:
    model = patch_model(tiny_model()) if patched else tiny_model()
    inputs = inputs_of(Case(frames=(3,), labels=None), model)
    with pytest.raises(ShapeError, match="pixel_values"):
        model(**inputs | {"pixel_values": inputs["pixel_values"].expand(-1, -1, 2, -1, -1, -1)})
    with pytest.raises(ShapeError, match="vision_position_ids has shape"):
        model(**inputs | {"vision_position_ids": torch.zeros(1, 2, dtype=torch.long)})
    with pytest.raises(ShapeError, match="aspect_ratio"):
        model(**inputs | {"aspect_ratio_ids": None})
