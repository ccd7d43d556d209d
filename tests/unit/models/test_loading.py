"""Layer: one process. A checkpoint whose weights are not exactly the model's is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.loading import load_model, load_processor, model_digest

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The weights of a class of transformers, which itself only warns of missing and unexpected tensors."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("lacking", "added", "message"),
    [
        (NORM, None, rf"it lacks 1 tensor \({NORM}\)"),
        (None, "model.layers.1.gate", r"the model does not have 1 tensor \(model.layers.1.gate\)"),
        (None, NORM, rf"other shapes have 1 tensor \({NORM}: \(3,\) in the checkpoint, \(8,\) in the model\)"),
    ],
)
def test_differing_weights_are_refused(file: Path, lacking: str | None, added: str | None, message: str) -> None:
    # A buffer of older releases, which the class itself ignores.
    weights = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(weights, file, {"format": "pt"})
    assert load_model(str(file.parent)).training is False
    weights = {name: x for name, x in weights.items() if name != lacking} | ({added: torch.zeros(3)} if added else {})
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(DataError, match=f"--model .*{message}.* Expected exactly the weights of LlamaForCausalLM"):
        load_model(str(file.parent))


def test_incomplete_directories_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no processor can be loaded"):
        load_processor(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no config.json there; give a directory"):
        load_model(str(tmp_path / "nothing"))


def test_digest_covers_pickled_weights(tmp_path: Path) -> None:
    digests = set()
    for value in (0.0, 1.0):
        torch.save({"weight": torch.full((64,), value)}, tmp_path / "pytorch_model.bin")
        digests.add(model_digest(str(tmp_path)))
    assert len(digests) == 2
