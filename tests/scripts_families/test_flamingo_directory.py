"""Layer: one process. OpenFlamingo directories: saved once, loaded by any name, converted from the published parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_directories import FLAMINGO_MARKS, MAKERS, character_tokenizer, make_open_flamingo, shake
from transformers import AutoModelForImageTextToText, CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.open_flamingo import OpenFlamingoProcessor, convert
from mllm_seqpar.running.loading import load_model, load_processor

if "open_flamingo" not in MAKERS:
    pytest.skip("open-flamingo is not installed", allow_module_level=True)


@pytest.mark.parametrize("kind", ["llama", "mpt"])
def test_each_tensor_is_saved_once_and_all_come_back(tmp_path: Path, kind: str) -> None:
    make_open_flamingo(tmp_path / "one", kind)
    model: Any = load_model(str(tmp_path / "one"))
    assert any(c.__module__ == "open_flamingo.src.flamingo" for c in type(model).__mro__) and not model.training
    saved = load_file(tmp_path / "one" / "model.safetensors")
    distinct = {id(x) for x in model.state_dict(keep_vars=True).values()}
    assert len(saved) == len(distinct) < len(model.state_dict())
    assert saved.keys() <= model.state_dict().keys()
    assert any(".gated_cross_attn_layer." in name for name in saved)  # as in published checkpoints
    assert not any("gated_cross_attn_layers" in name or "old_decoder_blocks" in name for name in saved)
    model.save_pretrained(tmp_path / "two")
    again: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "two", dtype=torch.bfloat16)
    assert again.perceiver.latents.dtype == torch.bfloat16
    computed = dict(model.named_buffers())  # rotary frequencies: not of the file, and not to be rounded
    assert all(torch.equal(x, computed[name]) for name, x in again.named_buffers() if name not in again.state_dict())
    assert kind != "llama" or any(name.endswith("inv_freq") for name, _ in again.named_buffers())
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "two", torch_dtype=torch.bfloat16)
    assert again.perceiver.latents.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="device_map: not known to OpenFlamingo.from_pretrained"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "two", device_map="cpu")
    again = load_model(str(tmp_path / "two"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.lang_encoder.gated_cross_attn_layers[-2 if kind == "llama" else -1].attn.only_attend_immediate_media


def test_from_published_parts(tmp_path: Path) -> None:
    """A checkpoint.pt has what was trained: the perceiver, the gated blocks, under the layers' names, embeddings."""
    tokenizer = character_tokenizer(bos="<s>", eos="</s>")
    assert not set(FLAMINGO_MARKS) & set(tokenizer.get_vocab())
    tokenizer.save_pretrained(tmp_path / "lm")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    lm = shake(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, pad_token_id=0)))
    lm.save_pretrained(tmp_path / "lm")
    tower = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    clip = shake(CLIPVisionModel(tower))
    clip.save_pretrained(tmp_path / "clip")
    CLIPImageProcessorPil(crop_size={"height": 16, "width": 16}).save_pretrained(tmp_path / "clip")
    parts = {"language_model": tmp_path / "lm", "vision_model": tmp_path / "clip"}
    convert(tmp_path / "untrained", **parts)
    state = shake(load_model(str(tmp_path / "untrained")), seed=1).state_dict()
    trained = {
        name: x
        for name, x in state.items()
        if name.startswith("perceiver") or ".gated_cross_attn_layer." in name or "embed_tokens" in name
    }
    torch.save({"model_state_dict": {f"module.{name}": x for name, x in trained.items()}}, tmp_path / "checkpoint.pt")
    convert(tmp_path / "whole", **parts, checkpoint=tmp_path / "checkpoint.pt", only_attend_immediate_media=False)
    model: Any = load_model(str(tmp_path / "whole"))
    for name, x in model.state_dict().items():
        if name in trained or "gated_cross" in name:
            assert torch.equal(x, state[name]), name
    for name, x in clip.state_dict().items():
        assert torch.equal(model.vision_encoder.state_dict()[name], x)
    layer = lm.state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(model.lang_encoder.old_decoder_blocks[1].mlp.up_proj.weight, layer)
    assert not model.lang_encoder.gated_cross_attn_layers[0].attn.only_attend_immediate_media
    processor: Any = load_processor(str(tmp_path / "whole"))
    picture = torch.zeros(3, 20, 30, dtype=torch.uint8)
    made = processor(text="<image>hi<|endofchunk|>", images=[[picture]])
    assert int(made["lang_x"][0, 0]) == model.media_token_id and int(made["lang_x"][0, -1]) == model.eoc_token_id
    with pytest.raises(DataError, match="unknown arguments: max_length, truncation"):
        processor(text="<image>hi", images=[[picture]], truncation=True, max_length=4)
    pixels = torch.randn(2, 3, 16, 16)
    pooled, tokens = model.vision_encoder(pixels)
    hidden = clip(pixel_values=pixels)
    assert torch.equal(tokens, hidden.last_hidden_state[:, 1:]) and torch.equal(pooled, hidden.pooler_output)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    make_open_flamingo(tmp_path / "one")
    weights = load_file(tmp_path / "one" / "model.safetensors")
    del weights["perceiver.latents"]
    save_file(weights, tmp_path / "one" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 weights of the model are missing, among them perceiver.latents"):
        load_model(str(tmp_path / "one"))
    save_file(weights | {"extra": torch.zeros(1)}, tmp_path / "one" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no weights named extra"):
        load_model(str(tmp_path / "one"))
    (tmp_path / "one" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model.safetensors there"):
        load_model(str(tmp_path / "one"))
    with pytest.raises(DataError, match=r"no token <image>, <\|endofchunk\|>"):
        OpenFlamingoProcessor(CLIPImageProcessorPil(), character_tokenizer(bos="<s>", eos="</s>"))
