"""A tiny mPLUG-Owl3: the real classes with random weights. See `tiny_models`."""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, SiglipVisionConfig

from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration

from . import SPECIAL_TOKENS, Sizes, TinyCase, frame_shard, set_weights

GATES = ("per_head", "vector", None)
IMAGE_TOKEN = 255
IMAGE_SIZE = 28
TOKENS_PER_FRAME = 4


def tiny_config(gate: str | None = "per_head", **overrides: Any) -> MPlugOwl3Config:
    """Return a config of 4 layers of width 64, hyper layers 1 and 3, 4 heads, 2 KV heads of 16, 4 tokens a frame."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**sizes | {"image_size": IMAGE_SIZE, "patch_size": 14} | overrides.pop("vision", {}))
    fields: dict[str, Any] = {"gate": gate, "hyper_layers": [1, 3], "image_token_id": IMAGE_TOKEN, "vocab_size": 256}
    fields |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    fields |= SPECIAL_TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 4096, "vision_config": vision}
    return MPlugOwl3Config(**fields | overrides)


def tiny_model(gate: str | None = "per_head", seed: int = 0, **overrides: Any) -> MPlugOwl3ForConditionalGeneration:
    """Return a model in eval mode whose norms are not ones, whose biases and gates are not zeros."""
    # With sharper attention, float32 rounding reaches 1e-5 in the gradients.
    rules = {r"\.gate$": (0.0, 1.0), "norm.*weight$": (1.0, 0.2), "bias$": (0.0, 0.3), "embed|probe": (0.0, 0.5)}
    return set_weights(MPlugOwl3ForConditionalGeneration(tiny_config(gate, **overrides)).eval(), rules, seed)


def arguments_of(sizes: Sizes) -> dict[str, Any]:
    layers = {"num_key_value_heads": sizes.kv_heads, "hyper_layers": [layer + 1 for layer in sizes.cross_layers]}
    tower = {"hidden_size": sizes.tower_width, "num_attention_heads": sizes.tower_heads}
    return sizes.text | layers | {"vision": sizes.tower | tower}


def tiny_frames(count: int, seed: int = 0, size: int = IMAGE_SIZE) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def tiny_text(*frames: int, length: int = 12, seed: int = 0) -> Tensor:
    """Return (B, length) token ids; sample i has `frames[i]` placeholders, none of them first or last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, IMAGE_TOKEN, (len(frames), length), generator=generator)
    for sample, count in enumerate(frames):
        ids[sample, torch.randperm(length - 2, generator=generator)[:count] + 1] = IMAGE_TOKEN
    return ids


LORA_TARGETS = ["q_proj", "v_kv_proj", "k_proj"]


@dataclass(frozen=True)
class Case(TinyCase):
    """A batch of mPLUG-Owl3, and the options of the tiny model that takes it."""

    frames: tuple[int, ...] = (5,)
    length: int = 13
    packed: tuple[int, ...] = ()  # the lengths of the sequences in each row, which `position_ids` separate
    offsets: bool = False  # whether `media_offset` is passed


def inputs_of(case: Case, model: Any) -> dict[str, Any]:
    ids, real = tiny_text(*case.frames, length=case.length), case.real()
    inputs: dict[str, Any] = dict(case.arguments)
    if real is not None:
        for sample in range(1, len(ids)):
            # All placeholders stay: they precede the text, which loses as many tokens as padding adds.
            is_frame = ids[sample] == IMAGE_TOKEN
            tokens = torch.cat([ids[sample][is_frame], ids[sample][~is_frame]])
            ids[sample] = torch.cat([tokens.new_zeros(2 * sample), tokens[: case.length - 2 * sample]])
        if case.padding == "right":
            ids = ids.flip(1)
        inputs["attention_mask"] = real.long()
    inputs["input_ids"] = ids
    if case.packed:
        positions = torch.cat([torch.arange(part) for part in case.packed])
        inputs |= {"position_ids": positions[None].expand(len(ids), -1), "use_cache": False}
    inputs |= case.targets(ids)
    total = sum(case.frames)
    if total and case.features:
        generator, vision = torch.Generator().manual_seed(3), model.config.vision_config
        tokens = (vision.image_size // vision.patch_size) ** 2
        inputs["image_embeds"] = torch.randn(total, tokens, model.config.hidden_size, generator=generator)
    elif total:
        inputs["pixel_values"] = tiny_frames(total, size=model.config.vision_config.image_size)
    if case.offsets or case.embeds:
        inputs["media_offset"] = media_offset(model.config.gate, ids)
    return case.prepared(inputs, model)


def media_offset(gate: str | None, ids: Tensor) -> Any:
    """Return `media_offset` in the form that the published checkpoints take."""
    placeholders = ids == IMAGE_TOKEN
    if gate is None:
        return [row.nonzero().flatten() for row in placeholders]
    counts = placeholders.sum(1)
    first = (counts.cumsum(0) - counts)[:, None].expand_as(ids)
    before = placeholders.long().cumsum(1) - placeholders.long()
    stop = torch.where(counts[:, None] > 0, first + before, -1000000)
    return torch.stack([first, stop], dim=-1)


def local_frames(inputs: dict[str, Any], group: Any = None, layout: str = "contiguous") -> dict[str, Any]:
    name = "pixel_values" if "pixel_values" in inputs else "image_embeds"
    return frame_shard(inputs, {name: inputs[name]}, group, layout)


def shard_units(model: Any) -> list[Any]:
    return [*model.language_model.model.layers, *model.vision_model.encoder.layers]


def tiny_tokenizer(*, placeholder: bool = True, end_of_document: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters and ChatML's marks, with the tiny model's placeholder if `placeholder`."""
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
