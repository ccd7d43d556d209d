"""A tiny IDEFICS: the real class with random weights. See `tiny_models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import IdeficsConfig, IdeficsForVisionText2Text

from mllm_seqpar._compat import CACHE_IS_PAST_KEY_VALUES

from . import SPECIAL_TOKENS, Sizes, TinyCase, frame_shard, set_weights

VOCABULARY = 128
LORA_TARGETS = r"model\.(layers\.\d+\.self_attn|gated_cross_attn_layers\.\d+\.cross_attn)\.(q|k|v|o)_proj"
FRAME_INPUTS = ("pixel_values", "image_encoder_embeddings", "perceiver_embeddings")


@dataclass(frozen=True)
class Case(TinyCase):
    """A batch of IDEFICS; `frames` are images, `features` is None, "encoder" or "perceiver"."""

    mask: str = "last"  # what a token sees: the "last" image, all "before" it, some of them ("holes") or "nothing"


def tiny_model(**overrides: Any) -> Any:
    """Return a model in eval mode of 4 layers of width 32, with a cross-attention block before every second one."""
    vision = {"embed_dim": 24, "image_size": 16, "patch_size": 8, "intermediate_size": 32}
    perceiver = {"resampler_depth": 2, "resampler_n_heads": 2, "resampler_head_dim": 8, "resampler_n_latents": 3}
    fields: dict[str, Any] = SPECIAL_TOKENS | {"vocab_size": VOCABULARY, "additional_vocab_size": 0, "hidden_size": 32}
    fields |= {"intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "cross_layer_interval": 2}
    fields |= {"qk_layer_norms": True, "alpha_type": "vector", "alpha_initializer": "ones", "dropout": 0.0}
    fields |= {"use_resampler": False, "tie_word_embeddings": False, "max_position_embeddings": 512}
    fields["vision_config"] = vision | {"num_hidden_layers": 2, "num_attention_heads": 2}
    fields["perceiver_config"] = perceiver | {"qk_layer_norms_perceiver": True}
    fields |= {f"freeze_{part}": False for part in ("text_layers", "vision_layers", "lm_head")} | overrides
    model = IdeficsForVisionText2Text(IdeficsConfig(**fields)).eval()
    rules = {"alpha": (0.0, 1.0), "norm.*weight$": (1.0, 0.2), "bias$": (0.0, 0.3), "embed|latents": (0.0, 0.5)}
    return set_weights(model, rules)


def arguments_of(sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of `tiny_model` for these sizes; with a resampler of 64 latents, frozen as published."""
    resampler = {"resampler_depth": 1, "resampler_n_heads": sizes.resampler_heads}
    tower = sizes.tower | {"embed_dim": sizes.tower_width, "num_attention_heads": sizes.tower_heads}
    return sizes.text | {
        "cross_layer_interval": sizes.interval,
        "use_resampler": True,
        "vision_config": tower,
        "perceiver_config": resampler | {"resampler_head_dim": sizes.resampler_head_dim},
        "freeze_text_layers": True,
        "freeze_vision_layers": True,
    }


def image_mask(case: Case) -> Tensor:
    """Return (B, L, I) of 0 and 1: which token sees which image of its sample; the first tokens see none."""
    batch, images = len(case.frames), max(case.frames)
    generator = torch.Generator().manual_seed(5)
    mask = torch.zeros(batch, case.length, images, dtype=torch.long)
    for sample, count in enumerate(case.frames):
        starts = sorted(torch.randperm(case.length - 2, generator=generator)[:count].add(1).tolist())
        for image, start in enumerate(starts):
            stop = starts[image + 1] if case.mask == "last" and image + 1 < count else case.length
            mask[sample, start:stop, image] = 1
    if case.mask == "holes":
        mask &= torch.rand(mask.shape, generator=generator) < 0.6
    elif case.mask == "nothing":
        mask.zero_()
    return mask


def inputs_of(case: Case, model: nn.Module) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    batch, images = len(case.frames), max(case.frames)
    additional = case.model.get("additional_vocab_size", 0)
    ids = torch.randint(3, VOCABULARY, (batch, case.length), generator=generator)
    ids[:, -additional - 1 : -1] = torch.arange(VOCABULARY, VOCABULARY + additional)
    inputs: dict[str, Any] = {"input_ids": ids, "image_attention_mask": image_mask(case), **case.arguments}
    real = case.real()
    if real is not None:
        ids.masked_fill_(~real, 0)
        inputs["attention_mask"] = real.long()
    inputs |= case.targets(ids)
    size = 24 if case.arguments.get("interpolate_pos_encoding") else 16
    pixels = torch.randn(batch, images, 3, size, size, generator=generator)
    match case.features:
        case None:
            inputs["pixel_values"] = pixels
        case "encoder":
            inputs["image_encoder_embeddings"] = torch.randn(batch, images, 5, 24, generator=generator)
        case "perceiver":
            inputs["perceiver_embeddings"] = torch.randn(batch, images, 3, 24, generator=generator)
    return case.prepared(inputs, model)


def local_frames(inputs: dict[str, Any], group: Any = None, layout: str = "contiguous") -> dict[str, Any]:
    return frame_shard(inputs, {n: inputs[n].flatten(0, 1) for n in FRAME_INPUTS if n in inputs}, group, layout)


def shard_units(model: Any) -> list[nn.Module]:
    inner = model.model
    return [*inner.layers, *inner.gated_cross_attn_layers, *inner.vision_model.encoder.layers]


def unpatched_forward(model: Any, inputs: dict[str, Any]) -> Any:
    """Return the unpatched model's output. With additional tokens, transformers fails and the loss is computed here."""
    labels = inputs.get("labels")
    if "perceiver_embeddings" in inputs and not CACHE_IS_PAST_KEY_VALUES.applies():  # 5.24 takes one list of images
        inputs = inputs | {"perceiver_embeddings": inputs["perceiver_embeddings"].flatten(0, 1)}
    if labels is None or not model.config.additional_vocab_size:
        return model(**inputs, output_hidden_states=True)
    out = model(**inputs | {"labels": None}, output_hidden_states=True)
    rows = out.logits[:, :-1].double()
    out.loss = nn.functional.cross_entropy(rows.flatten(0, 1), labels[:, 1:].flatten())
    return out
