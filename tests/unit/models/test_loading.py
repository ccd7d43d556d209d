"""Layer: one process. A checkpoint whose weights are not exactly the model's is refused, never filled or trimmed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.loading import load_model, model_digest

NORM = "model.layers.1.input_layernorm.weight"


def tiny_directory(folder: Path) -> Path:
    """A class of transformers itself, which only warns of what the checkpoint has too little or too much."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **sizes)).save_pretrained(folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lacks", rf"it lacks 1 tensor \({NORM}\)"),
        ("has more", r"the model does not have 1 tensor \(model.layers.1.gate\)"),
        ("shapes", rf"other shapes have 1 tensor \({NORM}: \(3,\) in the checkpoint, \(8,\) in the model\)"),
    ],
)
def test_loading_refuses_other_weights(tmp_path: Path, change: str, message: str) -> None:
    file = tiny_directory(tmp_path)
    weights = load_file(file)
    # Buffers of older releases, which the class itself ignores.
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, file, {"format": "pt"})
    assert load_model(str(tmp_path)).training is False
    if change == "lacks":
        del weights[NORM]
    elif change == "has more":
        weights["model.layers.1.gate"] = torch.zeros(3)
    else:
        weights[NORM] = torch.zeros(3)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(DataError, match=f"--model .*{message}.* Expected exactly the weights of LlamaForCausalLM"):
        load_model(str(tmp_path))


def test_loading_refuses_an_adapter(tmp_path: Path) -> None:
    tiny_directory(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(ConfigError, match=r"holds an adapter .*merge the adapter"):
        load_model(str(tmp_path))


def test_digest_covers_pickled_weights(tmp_path: Path) -> None:
    digests = set()
    for value in (0.0, 1.0):
        torch.save({"weight": torch.full((64,), value)}, tmp_path / "pytorch_model.bin")
        digests.add(model_digest(str(tmp_path)))
    assert len(digests) == 2
