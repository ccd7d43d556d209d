"""Layer: one process. Configurations and checkpoints of mPLUG-Owl3, saved by this package and in the published form."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from mllm_seqpar.errors import ConfigError, DataError, ShapeError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration
from mllm_seqpar.models.mplug_owl3.checkpoint import gate_of
from model_copies import tiny_model
from outcomes import error
from tiny_models.mplug_owl3 import IMAGE_TOKEN, tiny_config, tiny_frames, tiny_text

# A published config.json with the sizes of this test: written for transformers 4, without the fields that we add.
PUBLISHED = """{
    "architectures": ["mPLUGOwl3Model"], "model_type": "mplugowl3", "torch_dtype": "float32",
    "auto_map": {"AutoConfig": "configuration_mplugowl3.mPLUGOwl3Config",
                 "AutoModel": "modeling_mplugowl3.mPLUGOwl3Model",
                 "AutoModelForCausalLM": "modeling_mplugowl3.mPLUGOwl3Model"},
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 64,
    "hyper_layers": [1, 3], "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 32768,
    "max_window_layers": 28, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false,
    "transformers_version": "4.41.2", "use_cache": false, "use_sliding_window": false,
    "vision_config": {"hidden_size": 32, "image_size": 28, "intermediate_size": 48, "num_attention_heads": 2,
                      "model_type": "siglip_vision_model", "num_hidden_layers": 3, "patch_size": 14},
    "vision_batch_size": 3, "vocab_size": 256
}"""

LINEAR, GATED_LAYER = "{weight,bias}", "language_model.model.layers.2.self_attn.gate_proj.0"
GATE_NAMES = {"per_head": ["self_attn.gate_proj.0." + LINEAR], "vector": ["self_attn.gate"], None: []}


def expanded(name: str) -> list[str]:
    """Expand the braces of a name as a shell does."""
    if found := re.match(r"(.*?)\{([^}]*)\}(.*)", name):
        return [whole for part in found[2].split(",") for whole in expanded(found[1] + part + found[3])]
    return [name]


def published_names(gate: str | None) -> set[str]:
    layer, vision = "language_model.model.layers", "vision_model.encoder.layers.{0,1,2}"
    names = [
        "language_model.{model.embed_tokens,model.norm,lm_head}.weight",
        f"vision2text_model.{'{0,2}.' if gate is None else ''}" + LINEAR,
        layer + ".{0,1,2,3}.{input_layernorm,post_attention_layernorm,self_attn.o_proj}.weight",
        layer + ".{0,1,2,3}.self_attn.{q,k,v}_proj." + LINEAR,
        layer + ".{0,1,2,3}.mlp.{gate,up,down}_proj.weight",
        *(layer + ".{0,2}." + part for part in ["self_attn.v_kv_proj." + LINEAR, *GATE_NAMES[gate]]),
        "vision_model.{embeddings.patch_embedding,post_layernorm}." + LINEAR,
        "vision_model.{embeddings.position_embedding.weight,head.probe}",
        "vision_model.head.attention.in_proj_{weight,bias}",
        vision + ".{layer_norm1,layer_norm2,mlp.fc1,mlp.fc2}." + LINEAR,
        vision + ".self_attn.{q,k,v,out}_proj." + LINEAR,
        "vision_model.head.{attention.out_proj,layernorm,mlp.fc1,mlp.fc2}." + LINEAR,
    ]
    return {whole for name in names for whole in expanded(name)}


def publish(gate: str | None, directory: Path, shards: int = 1, head: bool = True) -> MPlugOwl3ForConditionalGeneration:
    """Write a checkpoint in the published form; return the model it was taken from."""
    model = tiny_model(gate, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    tensors = {name: value for name, value in model.state_dict().items() if head or ".head." not in name}
    (directory / "config.json").write_text(PUBLISHED)
    files = {"model.safetensors": tensors}
    if shards > 1:
        listed = [f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)]
        where = {name: listed[number % shards] for number, name in enumerate(tensors)}
        files = {file: {name: x for name, x in tensors.items() if where[name] == file} for file in listed}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for file, part in files.items():
        save_file(part, directory / file, {"format": "pt"})
    return model


def fields_of(config: MPlugOwl3Config) -> dict[str, Any]:
    fields = config.to_dict()
    for level in (fields, fields["vision_config"]):
        for name in ("_name_or_path", "dtype", "architectures"):
            level.pop(name, None)
    return fields


@pytest.mark.rounding
@pytest.mark.parametrize(("gate", "head", "shards"), [("per_head", True, 1), ("vector", False, 3), (None, False, 1)])
def test_published_checkpoint_loads(gate: str | None, head: bool, shards: int, tmp_path: Path) -> None:
    model = publish(gate, tmp_path, shards, head)
    assert set(model.state_dict()) == published_names(gate)
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText):
        loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        assert isinstance(loaded, MPlugOwl3ForConditionalGeneration) and not loaded.training
    assert loaded.config.gate == gate and loaded.config.rope_parameters["rope_theta"] == 1e6
    assert loaded.config.projector_layers == (2 if gate is None else 1)
    assert loaded.config.use_cache is False and hasattr(loaded.vision_model, "head") is head
    loaded.config.image_token_id = IMAGE_TOKEN
    assert_same_model(loaded, model)
    loaded.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["gate"] == gate and written["projector_layers"] == (2 if gate is None else 1)


def assert_same_model(loaded: Any, model: Any) -> None:
    """Weights are equal bit by bit, and logits almost: safetensors aligns weights in memory to 8 bytes only, and some
    kernels choose the order of a sum by the alignment of its inputs."""
    found, expected = loaded.state_dict(), model.state_dict()
    assert found.keys() <= expected.keys()  # published checkpoints of some sizes have no head of the vision tower
    for name, value in found.items():
        assert torch.equal(expected[name], value), name
    ids, frames = tiny_text(3, 1), tiny_frames(4)
    assert error(loaded(ids, frames).logits, model(ids, frames).logits) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "tied"), [("per_head", False), ("vector", True), (None, False)])
def test_saved_model_loads_unchanged(gate: str | None, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(gate, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert tied != any("language_model.lm_head.weight" in load_file(file) for file in files)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert tied == (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight)
    assert_same_model(loaded, model)
    assert fields_of(loaded.config) == fields_of(model.config)


def test_from_pretrained_checks_its_options(tmp_path: Path) -> None:
    publish("per_head", tmp_path)
    load = MPlugOwl3ForConditionalGeneration.from_pretrained
    assert load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load(tmp_path, attn_implementation="eager").config.vision_config._attn_implementation == "eager"
    assert load(tmp_path, use_cache=True, image_token_id=7).config.image_token_id == 7
    assert load(tmp_path, gate="per_head").config.gate == "per_head"
    config = MPlugOwl3Config.from_pretrained(tmp_path)
    assert load(tmp_path, config=config).config.gate == "per_head" and config.gate == "auto"
    assert load(tmp_path, config=str(tmp_path)).config.gate == "per_head"
    state = load_file(tmp_path / "model.safetensors")
    assert load(None, config=config, state_dict=state).config.gate == "per_head"
    for stated in ({"gate": None}, {"gate": "vector"}, {"projector_layers": 2}, {"hyper_layers": [1, 2]}):
        with pytest.raises(ConfigError, match=f"the config says {next(iter(stated))}=.*, and the weights are"):
            load(tmp_path, **stated)
    for name, value in (("ignore_mismatched_sizes", True), ("use_safetensors", False)):
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            load(tmp_path / "absent", **{name: value})  # before anything is read
    with pytest.raises(ConfigError, match="together with config"):
        load(None, config=config)


@pytest.mark.parametrize(
    ("left_out", "added", "message"),
    [
        ("language_model.model.layers.1.mlp.up_proj.weight", {}, r"it lacks 1 tensor \(language_model.model.layers.1"),
        (f"{GATED_LAYER}.bias", {}, "it lacks 1 tensor .*gate_proj.0.bias"),
        ("vision_model.head.mlp.fc1.bias", {}, "it lacks 1 tensor .*vision_model.head.mlp.fc1.bias"),
        (None, {"language_model.model.layers.3.extra": 2}, r"the model does not have 1 tensor .*layers.3.extra"),
        (None, {f"{GATED_LAYER}.bias": 8}, r"gate_proj.0.bias: \(8,\) in the checkpoint, \(16,\)"),
    ],
)
def test_differing_weights_are_refused_with_gate(
    left_out: str | None, added: dict[str, int], message: str, tmp_path: Path
) -> None:
    publish("per_head", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.zeros(size) for name, size in added.items()}
    tensors.pop(left_out or "", None)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=f"{message}.*mPLUG-Owl3 with gate='per_head'"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"self_attn.gate_proj.0.weight", "self_attn.gate_proj.0.bias", "mlp.gate_proj.weight"}, "per_head"),
        ({"self_attn.gate", "mlp.gate_proj.weight"}, "vector"),
        ({"mlp.gate_proj.weight"}, None),
        ({"self_attn.gate", "self_attn.gate_proj.0.weight"}, ConfigError),
        ({"self_attn.gate_proj.weight"}, ConfigError),
    ],
)
def test_gate_follows_from_tensor_names(names: set[str], expected: Any) -> None:
    keys = {f"language_model.model.layers.8.{name}" for name in {*names, "self_attn.v_kv_proj.weight"}}
    with pytest.raises(ConfigError, match="or no gate") if expected is ConfigError else nullcontext():
        assert gate_of(keys) == expected


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an mPLUG-Owl3 checkpoint"):
        gate_of({"language_model.model.norm.weight"})
    publish(None, tmp_path)
    save_file({"language_model.model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="published checkpoints have"):
        AutoModel.from_pretrained(tmp_path)


def test_vision_batch_size_limits_frames_per_call() -> None:
    model, frames, sizes = tiny_model(), tiny_frames(7), []
    whole = model.encode_frames(frames)
    model.config.vision_batch_size = 3
    model.vision_model.embeddings.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    torch.testing.assert_close(model.encode_frames(frames), whole)
    assert sizes == [3, 3, 1]


def test_only_safetensors_are_loaded(tmp_path: Path) -> None:
    model = publish(None, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match="neither.*safetensors"):
        AutoModel.from_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="holds pytorch_model.bin.*safetensors"):
        AutoModel.from_pretrained(tmp_path)


def test_new_model_has_initialised_weights() -> None:
    """Gates of a new model are half open, and no parameter is uninitialised memory."""
    model = AutoModel.from_config(tiny_config("vector"))
    for index in (0, 2):
        assert torch.equal(model.language_model.model.layers[index].self_attn.gate, torch.zeros(64))
    assert all(bool(weight.isfinite().all()) and weight.abs().max() < 10 for weight in model.parameters())


def test_token_embeddings_can_be_resized() -> None:
    model, ids = tiny_model("per_head"), tiny_text(1)
    model.resize_token_embeddings(260)
    ids[0, 0] = 259
    assert model.config.vocab_size == 260
    assert model(ids, tiny_frames(1), labels=ids).logits.shape == (1, 12, 260)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate": "blended"}, "gate is 'blended'; expected one of .*per_head.*vector.*None"),
        ({"gate": "auto"}, "gate is 'auto'"),
        ({"projector_layers": 3}, "projector_layers is 3; expected one of 1, 2, None"),
        ({"vision_batch_size": 0}, "vision_batch_size is 0"),
        ({"variant": "fused"}, "gate=None for 'fused'"),
        ({"hyper_layers": [0, 2]}, "counted from 1"),
        ({"hyper_layers": [5]}, "num_hidden_layers=4"),
        ({"hyper_layers": [2, 2]}, "distinct"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'dynamic'"),
    ],
)
def test_unsupported_field_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MPlugOwl3ForConditionalGeneration(tiny_config(**fields))


ONE = {"input_ids": tiny_text(1)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": tiny_text(0), "inputs_embeds": torch.zeros(1, 12, 64)}, "either input_ids or inputs_embeds"),
        ({"input_ids": tiny_text(2)}, "neither pixel_values nor image_embeds"),
        ({"input_ids": tiny_text(2), "pixel_values": tiny_frames(3)}, "2 frames .*, and 3 were passed"),
        (ONE | {"pixel_values": torch.zeros(1, 3, 56, 56)}, r"\(frames, 3, 28, 28\)"),
        (ONE | {"pixel_values": torch.zeros(3, 28, 28)}, r"\(frames, 3, 28, 28\)"),
        (ONE | {"image_embeds": torch.zeros(1, 4, 32)}, r"\(frames, tokens, 64\)"),
        (ONE | {"image_embeds": torch.zeros(1, 4, 64), "pixel_values": tiny_frames(1)}, "not both"),
    ],
)
def test_inconsistent_arguments_are_refused(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        tiny_model("per_head")(**call)


def test_reentrant_checkpointing_and_flex_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="use_reentrant"):
        tiny_model("per_head").gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="(?i)flex"):
        MPlugOwl3ForConditionalGeneration._from_config(tiny_config(), attn_implementation="flex_attention")
