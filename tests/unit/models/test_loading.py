"""Layer: one process. A checkpoint whose weights are not exactly the model's is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from family_directories import MAKERS
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.digests import model_digest
from mllm_seqpar.models.loading import load_model, load_processor

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The weights of a class of transformers, which itself only warns of missing and unexpected tensors."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


def check_differing_weights(file: Path, name: str, start: str = "", expected: str = "") -> None:
    """Change the tensor `name` of a file, and add one; each is an error that names the tensor.

    The message begins with `start` and says that exactly the weights of `expected` are needed; both are patterns.
    """
    weights = load_file(file)
    folder, further, shape = str(file.parent), f"{name}.more", tuple(weights[name].shape)
    assert load_model(folder).training is False
    for changed, message in (
        ({x: weights[x] for x in weights if x != name}, f"it lacks 1 tensor ({name})"),
        (weights | {further: torch.zeros(3)}, f"the model does not have 1 tensor ({further})"),
        (
            weights | {name: torch.zeros(3)},
            f"other shapes have 1 tensor ({name}: (3,) in the checkpoint, {shape} in the model)",
        ),
    ):
        save_file(changed, file, {"format": "pt"})
        pattern = f"^{start}.*{re.escape(message)}.* Expected exactly the weights of {expected}"
        with pytest.raises(DataError, match=pattern):
            load_model(folder)


def test_differing_weights_are_refused(file: Path) -> None:
    # A buffer of older releases, which the class itself ignores.
    weights = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(weights, file, {"format": "pt"})
    check_differing_weights(file, NORM, "--model ", "LlamaForCausalLM")


NATIVE = {
    "moss_vl": "model.separator_token",
    "open_flamingo": "perceiver.latents",
    "video_mllama": "model.multi_modal_projector.weight",
}


@pytest.mark.parametrize("family", [family for family in NATIVE if family in MAKERS])
def test_differing_weights_of_native_models_are_refused(family: str, tmp_path: Path) -> None:
    MAKERS[family](tmp_path)
    check_differing_weights(tmp_path / "model.safetensors", NATIVE[family])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no (model.safetensors|file named model.safetensors)"):
        load_model(str(tmp_path))


def test_incomplete_directories_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no files of a tokenizer .* and of the preprocessing of images"):
        load_processor(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no config.json there; give a directory"):
        load_model(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", "it has no files of a tokenizer (tokenizer.json, "),
        ("preprocessor_config.json", "it has no files of the preprocessing of images (preprocessor_config.json, or"),
    ],
)
def test_missing_file_of_a_processor_is_named(inference_files: Path, tmp_path: Path, name: str, message: str) -> None:
    folder = shutil.copytree(inference_files / "gated", tmp_path / "model")
    load_processor(str(folder))
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"^--model {folder}: {re.escape(message)}"):
        load_processor(str(folder))


def edited(folder: Path, copy: Path, **fields: Any) -> str:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return str(copy)


def test_config_of_a_much_larger_model_is_refused_before_anything_is_built(
    inference_files: Path, tmp_path: Path
) -> None:
    large: dict[str, Any] = {"hidden_size": 8192, "intermediate_size": 65536, "num_hidden_layers": 200}
    large |= {"layer_types": ["full_attention"] * 200, "num_attention_heads": 64, "num_key_value_heads": 64}
    folder = edited(inference_files / "gated", tmp_path / "model", **large)
    with pytest.raises(DataError, match="it lacks .* tensors .* other shapes have .*config.json belongs to it$"):
        load_model(folder)  # 1.8 TB of weights in float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "many"}, "expected int, got str"),
        ({"model_type": "none"}, "custom code|does not recognize this architecture"),
        ({"rope_parameters": {"rope_type": "none"}}, "the model that its config.json describes cannot be loaded"),
    ],
)
def test_config_that_describes_no_model_is_one_sentence(
    inference_files: Path, tmp_path: Path, fields: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited(inference_files / "gated", tmp_path / "model", **fields)
    with pytest.raises(ConfigError, match=message) as found:
        load_model(folder)
    assert str(found.value).startswith(f"--model {folder}: ") and "\n" not in str(found.value)
    assert "[y/N]" not in capsys.readouterr().out  # no question to the user of a terminal


def test_digest_covers_pickled_weights(tmp_path: Path) -> None:
    digests = set()
    for value in (0.0, 1.0):
        torch.save({"weight": torch.full((64,), value)}, tmp_path / "pytorch_model.bin")
        digests.add(model_digest(str(tmp_path)))
    assert len(digests) == 2
