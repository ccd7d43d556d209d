"""Layer: one process. The directory of an adapter gives its base model with the adapter merged into it."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.digests import model_digest
from mllm_seqpar.models.loading import load_model, load_processor


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter whose weights are not 0, on all linear layers, and one layer that is trained completely."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["norm"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        adapted.base_model.model.model.norm.modules_to_save["default"].weight += 1
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(8)[None]).logits


def test_adapter_is_merged_into_its_base_model(adapter: Path) -> None:
    base = LlamaForCausalLM.from_pretrained(adapter.parent / "base")
    expected = _logits(peft.PeftModel.from_pretrained(base, adapter))
    model = load_model(str(adapter))
    assert isinstance(model, LlamaForCausalLM) and not model.training
    torch.testing.assert_close(_logits(model), expected, rtol=1e-4, atol=1e-5)
    assert (_logits(load_model(str(adapter.parent / "base"))) - expected).abs().max() > 0.01


@pytest.mark.parametrize("changed", ["base/model.safetensors", "adapter/adapter_model.safetensors"])
def test_digest_of_adapter_covers_its_base_model(adapter: Path, changed: str) -> None:
    before = model_digest(str(adapter))
    file = adapter.parent / changed
    save_file(load_file(file) | {"more": torch.zeros(1)}, file, {"format": "pt"})
    assert model_digest(str(adapter)) != before


def test_tensors_that_are_not_the_adapters_are_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({**dict(list(weights.items())[1:]), "other": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(DataError, match=r"it lacks 1 tensor .*does not have 1 tensor \(other\)"):
        load_model(str(adapter))
    save_file({name: torch.zeros(3, 3) for name in weights}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="the adapter cannot be merged"):
        load_model(str(adapter))


def test_what_needs_a_whole_model_names_the_command_that_merges(adapter: Path) -> None:
    with pytest.raises(ConfigError, match=r"it holds an adapter, .*mllm-seqpar convert --model .* --output MERGED"):
        load_model(str(adapter), device_map="meta")


def test_missing_base_model_is_named(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "elsewhere"}))
    for load in (load_model, load_processor, model_digest):
        with pytest.raises(ConfigError, match=r"base model 'elsewhere' is not a model directory here; write"):
            load(str(adapter))
    (adapter / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="a whole model and an adapter"):
        load_model(str(adapter))


def test_truncated_weights_are_named(adapter: Path) -> None:
    for folder, name in ((adapter, "adapter_model.safetensors"), (adapter.parent / "base", "model.safetensors")):
        content = (folder / name).read_bytes()
        for size in (0, 4, len(content) - 100):
            (folder / name).write_bytes(content[:size])
            with pytest.raises(ConfigError, match=rf"{name} \({size:,} bytes\) is not a complete safetensors file"):
                load_model(str(adapter))
        (folder / name).write_bytes(content)
    load_model(str(adapter))
