"""Layer: one process. Configurations and checkpoints of mPLUG-Owl3, saved by this package and in the published form."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, SiglipVisionConfig

from mllm_seqpar.errors import ConfigError, DataError, ShapeError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration, register
from mllm_seqpar.models.mplug_owl3.checkpoint import gate_of
from mllm_seqpar.patches.mplug_owl3.testing import GATES, IMAGE_TOKEN, tiny_config, tiny_frames, tiny_model, tiny_text
from outcomes import error

# A published config.json with the sizes of this test: written for transformers 4, without the fields that we add.
PUBLISHED = {
    "architectures": ["mPLUGOwl3Model"],
    "auto_map": {
        "AutoConfig": "configuration_mplugowl3.mPLUGOwl3Config",
        "AutoModel": "modeling_mplugowl3.mPLUGOwl3Model",
        "AutoModelForCausalLM": "modeling_mplugowl3.mPLUGOwl3Model",
    },
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "hyper_layers": [1, 3],
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "mplugowl3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.41.2",
    "use_cache": False,
    "use_sliding_window": False,
    "vision_config": {
        "hidden_size": 32,
        "image_size": 28,
        "intermediate_size": 48,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "patch_size": 14,
    },
    "vision_batch_size": 3,
    "vocab_size": 256,
}


GATE_NAMES = {
    "per_head": ["self_attn.gate_proj.0.weight", "self_attn.gate_proj.0.bias"],
    "vector": ["self_attn.gate"],
    None: [],
}
PROJECTOR_NAMES = {"per_head": ["weight", "bias"], "vector": ["weight", "bias"]} | {
    None: ["0.weight", "0.bias", "2.weight", "2.bias"]
}


def published_names(gate: str | None, head: bool = True) -> set[str]:
    names = {"language_model.model.embed_tokens.weight", "language_model.model.norm.weight"}
    names |= {"language_model.lm_head.weight"}
    names |= {f"vision2text_model.{part}" for part in PROJECTOR_NAMES[gate]}
    for layer in range(4):
        parts = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight"]
        parts += [f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
        parts += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        if layer in (0, 2):
            parts += ["self_attn.v_kv_proj.weight", "self_attn.v_kv_proj.bias"]
            parts += GATE_NAMES[gate]
        names |= {f"language_model.model.layers.{layer}.{part}" for part in parts}
    vision = ["embeddings.patch_embedding.weight", "embeddings.patch_embedding.bias"]
    vision += ["embeddings.position_embedding.weight", "post_layernorm.weight", "post_layernorm.bias"]
    modules = ["layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"]
    modules += [f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")]
    vision += [f"encoder.layers.{n}.{part}.{k}" for n in range(3) for part in modules for k in ("weight", "bias")]
    if head:
        vision += ["head.probe", "head.attention.in_proj_weight", "head.attention.in_proj_bias"]
        parts = ["attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2"]
        vision += [f"head.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    return names | {f"vision_model.{name}" for name in vision}


def publish(gate: str | None, directory: Path, shards: int = 1, head: bool = True) -> MPlugOwl3ForConditionalGeneration:
    """Write a checkpoint in the published form; return the model it was taken from."""
    model = tiny_model(gate, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    tensors = {name: value for name, value in model.state_dict().items() if head or ".head." not in name}
    (directory / "config.json").write_text(json.dumps(PUBLISHED))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return model
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: value for number, (name, value) in enumerate(tensors.items()) if number % shards == shard}
        save_file(part, directory / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return model


def fields_of(config: MPlugOwl3Config) -> dict[str, Any]:
    fields = config.to_dict()
    vision = fields.pop("vision_config")
    left_out = ("_name_or_path", "dtype", "architectures")
    return {"vision": {k: v for k, v in vision.items() if k not in left_out}} | {
        name: value for name, value in fields.items() if name not in left_out
    }


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
@pytest.mark.parametrize("gate", GATES)
def test_saved_model_loads_unchanged(gate: str | None, tmp_path: Path) -> None:
    model = tiny_model(gate)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModel.from_pretrained(tmp_path)
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
    with pytest.raises(ConfigError, match="ignore_mismatched_sizes is True"):
        load(tmp_path, ignore_mismatched_sizes=True)
    with pytest.raises(ConfigError, match="use_safetensors is False"):
        load(tmp_path, use_safetensors=False)
    with pytest.raises(ConfigError, match="together with config"):
        load(None, config=config)


GATED_LAYER = "language_model.model.layers.2.self_attn.gate_proj.0"


@pytest.mark.parametrize(
    ("left_out", "added", "message"),
    [
        ("language_model.model.layers.1.mlp.up_proj.weight", {}, r"it lacks 1 tensor \(language_model.model.layers.1"),
        (f"{GATED_LAYER}.bias", {}, "it lacks 1 tensor .*gate_proj.0.bias"),
        ("vision_model.head.mlp.fc1.bias", {}, "it lacks 1 tensor .*vision_model.head.mlp.fc1.bias"),
        (None, {"language_model.model.layers.3.extra": (2,)}, r"the model does not have 1 tensor .*layers.3.extra"),
        (None, {f"{GATED_LAYER}.weight": (8, 8)}, r"gate_proj.0.weight: \(8, 8\) in the checkpoint, \(16, 16\)"),
    ],
)
def test_differing_weights_are_refused_with_gate(
    left_out: str | None, added: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    publish("per_head", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(left_out or "", None)
    tensors |= {name: torch.zeros(shape) for name, shape in added.items()}
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
    if expected is ConfigError:
        with pytest.raises(ConfigError, match="or no gate"):
            gate_of(keys)
    else:
        assert gate_of(keys) == expected
    with pytest.raises(ConfigError, match="not an mPLUG-Owl3 checkpoint"):
        gate_of({"language_model.model.norm.weight"})


def test_vision_batch_size_limits_frames_per_call() -> None:
    model, frames, sizes = tiny_model(), tiny_frames(7), []
    whole = model.encode_frames(frames)
    model.config.vision_batch_size = 3
    model.vision_model.embeddings.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    torch.testing.assert_close(model.encode_frames(frames), whole)
    assert sizes == [3, 3, 1]


@pytest.mark.parametrize(("file", "message"), [("pytorch_model.bin", "holds pytorch_model.bin"), (None, "neither")])
def test_only_safetensors_are_loaded(file: str | None, message: str, tmp_path: Path) -> None:
    model = publish(None, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if file:
        torch.save(model.state_dict(), tmp_path / file)
    with pytest.raises(DataError, match=f"{message}.*safetensors"):
        AutoModel.from_pretrained(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    publish(None, tmp_path)
    save_file({"language_model.model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="published checkpoints have"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.slow
def test_tied_embeddings_are_saved_once(tmp_path: Path) -> None:
    model = tiny_model("vector", tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    assert "language_model.lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert_same_model(loaded, model)


def test_new_model_has_initialised_weights() -> None:
    """Gates of a new model are half open, and no parameter is uninitialised memory."""
    model = MPlugOwl3ForConditionalGeneration(tiny_config("vector"))
    for index in (0, 2):
        assert torch.equal(model.language_model.model.layers[index].self_attn.gate, torch.zeros(64))
    assert all(bool(weight.isfinite().all()) and weight.abs().max() < 10 for weight in model.parameters())


def test_token_embeddings_can_be_resized() -> None:
    model = tiny_model("per_head")
    model.resize_token_embeddings(260)
    assert model.config.vocab_size == 260
    ids = tiny_text(1)
    ids[0, 0] = 259
    assert model(ids, tiny_frames(1), labels=ids).logits.shape == (1, 12, 260)


class TestConfig:
    def test_defaults_are_the_published_sizes(self) -> None:
        config = MPlugOwl3Config()
        assert (config.gate, config.image_token_id, config.hyper_layers) == ("auto", None, [1, 9, 17, 25])
        assert isinstance(config.vision_config, SiglipVisionConfig)
        vision = config.vision_config
        assert (vision.hidden_size, vision.intermediate_size, vision.image_size) == (1152, 4304, 384)
        assert (vision.num_hidden_layers, vision.num_attention_heads, vision.patch_size) == (27, 16, 14)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"gate": "blended"}, "gate is 'blended'; expected one of .*per_head.*vector.*None"),
            ({"projector_layers": 3}, "projector_layers is 3; expected 1 or 2"),
            ({"vision_batch_size": 0}, "vision_batch_size is 0"),
            ({"variant": "fused"}, "gate=None for 'fused'"),
            ({"hyper_layers": [0, 2]}, "counted from 1"),
            ({"hyper_layers": [5]}, "num_hidden_layers=4"),
            ({"hyper_layers": [2, 2]}, "distinct"),
            ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'dynamic'"),
        ],
    )
    def test_unsupported_field_is_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            tiny_config(**fields)

    def test_new_model_requires_a_gate(self) -> None:
        with pytest.raises(ConfigError, match="gate is 'auto'"):
            MPlugOwl3ForConditionalGeneration(tiny_config("auto"))

    def test_registering_twice_changes_nothing(self) -> None:
        register()
        assert type(AutoModel.from_config(tiny_config())) is MPlugOwl3ForConditionalGeneration


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": tiny_text(0), "inputs_embeds": torch.zeros(1, 12, 64)}, "either input_ids or inputs_embeds"),
        ({"input_ids": tiny_text(2)}, "neither pixel_values nor image_embeds"),
        ({"input_ids": tiny_text(2), "pixel_values": tiny_frames(3)}, "2 frames .*, and 3 were passed"),
        ({"input_ids": tiny_text(1), "pixel_values": torch.zeros(1, 3, 56, 56)}, r"\(frames, 3, 28, 28\)"),
        ({"input_ids": tiny_text(1), "pixel_values": torch.zeros(3, 28, 28)}, r"\(frames, 3, 28, 28\)"),
        ({"input_ids": tiny_text(1), "image_embeds": torch.zeros(1, 4, 32)}, r"\(frames, tokens, 64\)"),
        (
            {"input_ids": tiny_text(1), "image_embeds": torch.zeros(1, 4, 64), "pixel_values": tiny_frames(1)},
            "not both",
        ),
    ],
)
def test_inconsistent_arguments_are_refused(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        tiny_model("per_head")(**call)


def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_reentrant"):
        tiny_model("per_head").gradient_checkpointing_enable({"use_reentrant": True})


def test_flex_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="(?i)flex"):
        MPlugOwl3ForConditionalGeneration._from_config(tiny_config(), attn_implementation="flex_attention")
