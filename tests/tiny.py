"""A tiny mPLUG-Owl3 for tests: the real classes, random weights, and nothing left at a value that hides a mistake."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, SiglipVisionConfig

from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration

GATES = ("per_head", "vector", None)
IMAGE_TOKEN = 255
IMAGE_SIZE = 28
TOKENS_PER_FRAME = 4


def tiny_config(gate: str | None = "per_head", **overrides: Any) -> MPlugOwl3Config:
    """4 layers of width 64, hyper layers 1 and 3, 4 heads over 2 KV heads of 16; 4 tokens a frame."""
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": 14,
    }
    fields: dict[str, Any] = {
        "gate": gate,
        "hyper_layers": [1, 3],
        "image_token_id": IMAGE_TOKEN,
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision |= overrides.pop("vision", {})
    return MPlugOwl3Config(**(fields | {"vision_config": SiglipVisionConfig(**vision)} | overrides))


def tiny_model(gate: str | None = "per_head", seed: int = 0, **overrides: Any) -> MPlugOwl3ForConditionalGeneration:
    """A model in eval mode. Norms are not ones, biases and gates not zeros, and attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    model = MPlugOwl3ForConditionalGeneration(tiny_config(gate, **overrides)).eval()

    def normal(like: Tensor, scale: float) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype) * scale

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".gate"):
                weight.copy_(normal(weight, 1.0))
            elif "norm" in name and name.endswith("weight"):
                weight.copy_(1 + normal(weight, 0.2))
            elif name.endswith("bias"):
                weight.copy_(normal(weight, 0.3))
            elif "embed" in name or "probe" in name:
                weight.copy_(normal(weight, 0.5))
            else:
                # Sharper attention than this and float32 rounding reaches 1e-5 in the gradients.
                weight.copy_(normal(weight, weight[0].numel() ** -0.5))
    return model


def tiny_frames(count: int, seed: int = 0) -> Tensor:
    """(count, 3, 28, 28) random frames."""
    return torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(seed))


def tiny_text(*frames: int, length: int = 12, seed: int = 0) -> Tensor:
    """(B, length) tokens with as many placeholders per sample as `frames` says, never at an end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, IMAGE_TOKEN, (len(frames), length), generator=generator)
    for sample, count in enumerate(frames):
        ids[sample, torch.randperm(length - 2, generator=generator)[:count] + 1] = IMAGE_TOKEN
    return ids


def tiny_tokenizer(*, placeholder: bool = True, end_of_document: bool = True) -> PreTrainedTokenizerFast:
    """Bytes as characters and ChatML's marks, 255 tokens or fewer; `placeholder` is the token of the tiny model."""
    marks = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"] + ["<|endoftext|>"] * end_of_document
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate(marks + characters)}
    if placeholder:
        vocabulary["<|image|>"] = IMAGE_TOKEN
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.add_special_tokens([*marks, *(["<|image|>"] if placeholder else [])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>", padding_side="left"
    )


def write_published_tokenizer(folder: Path) -> None:
    """Write a small tokenizer in the form of the published ones: Qwen2's byte pairs, no token for `<|image|>`.

    As with Qwen2's own merges, `>` merges with a line break after it and `<` with a space before it.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = [chr(byte) for byte in plain] + [chr(256 + number) for number in range(len(others))]
    merges = ["> Ċ", "Ġ <", "i m", "im a", "ima g", "imag e", "Ċ Ċ"]
    words = characters + [merge.replace(" ", "") for merge in merges]
    marks = {number: mark for number, mark in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), len(words))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "added_tokens_decoder": {str(number): token | {"content": mark} for number, mark in marks.items()},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
