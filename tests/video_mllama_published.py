"""Batches of MOSS-Video-Preview, and what the published code computes for them.

`video_mllama_published.json` holds the numbers. The authors' modelling code (OpenMOSS/MOSS-Video-Preview at 107312a)
computed them unchanged, with transformers 4.46.3 and `mllama_use_full_attn`, for a tiny model with the weights and
inputs of this module. Greedy tokens come from passes without a cache, in which the published code rotates queries.

Weights and inputs follow from integers, so that they have the same bits everywhere.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

IMAGE, VOCABULARY, SIDE, SILENCE = 96, 96, 56, 7
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": VOCABULARY, **SPECIAL}
TEXT |= {"cross_attention_layers": [1, 3]}
THETA = 10000.0
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64}
VISION: dict[str, Any] = {"hidden_size": 32, "attention_heads": 2, "intermediate_size": 48, "vision_output_dim": 96}
VISION |= {"num_hidden_layers": 3, "num_global_layers": 2, "intermediate_layers_indices": [0, 2], "max_num_tiles": 4}
VISION |= {"image_size": SIDE, "patch_size": 14}

CASES: dict[str, dict[str, Any]] = {
    "average": {"places": [[1, 4, 5]]},
    "average, one token": {"places": [[1, 4, 5]], "stride": 3},
    "max": {"places": [[3, 4, 5]], "pool_mode": "max"},
    "bilinear": {"places": [[1, 4, 5]], "pool_mode": "bilinear", "stride": 4},
    "channelFusion": {"places": [[1, 4, 5]], "pool_mode": "channelFusion"},
    "all patches": {"places": [[0, 11]], "pool_mode": None, "stride": None},
    "batch, one sample without frames": {"places": [[2, 3, 7], [5], []], "padding": [0, 3, 5]},
    "no positions": {"places": [[1, 4], [6]], "without": ("vision_position_ids",)},
    "no mask": {"places": [[1, 4], [6]], "without": ("cross_attention_mask",)},
    "silence": {"places": [[1, 4], [6]], "silence_token_id": SILENCE, "silence_token_weight": 0.1},
    "text only": {"places": [[1], [2]], "without": ("cross_attention_mask", "vision_position_ids", "pixels")},
}
"""By name: the places of image tokens of each sample, and how the case differs from the first."""

GRADIENTS = (
    r"layers\.(1\.cross_attn|2\.self_attn|3\.cross_attn)|lm_head|projector|patch_merger|tile_embedding|class_emb"
)
"""The weights whose gradients are compared."""


def settings(case: dict[str, Any]) -> dict[str, Any]:
    """Return how the model of a case pools and weighs."""
    names = ("pool_mode", "stride", "silence_token_id", "silence_token_weight")
    return {"pool_mode": "average", "stride": 2} | {name: case[name] for name in names if name in case}


def noise(shape: Any, seed: int) -> Tensor:
    """Return float32 numbers without pattern, of mean 0 and standard deviation 1."""
    index = torch.arange(math.prod(shape), dtype=torch.int64) + 1009 * seed
    mixed = (index * 40503 + 12345) % 65537
    for _ in range(3):
        mixed = (mixed * mixed + 7919 * index + seed) % 65537
    return ((mixed.double() / 65536 - 0.5) * 12**0.5).float().reshape(tuple(shape))


def seed_of(name: str) -> int:
    return sum((place + 1) * ord(letter) for place, letter in enumerate(name)) % 30011


def weight(name: str, shape: Any) -> Tensor:
    """Return the weight of a published name."""
    x = noise(shape, seed_of(name))
    if re.search(r"gate(_attn|_ffn)?$", name):
        return 0.8 + 0.2 * x
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.3 * x
    if "embed" in name and "patch_embedding" not in name:
        return 0.5 * x
    return 0.2 * x if len(shape) < 2 else x * math.prod(shape[1:]) ** -0.5


def inputs_of(case: dict[str, Any]) -> dict[str, Tensor]:
    """Return the arguments of the forward, with labels."""
    places, length = case["places"], 12 + 2 * ("padding" in case)
    batch, frames = len(places), max(map(len, places))
    ids = 8 + (noise((batch, length), 3).abs() * 1000).long() % (VOCABULARY - 8)
    mask, valid = torch.zeros(batch, length, frames, 1, dtype=torch.long), torch.ones(batch, length, dtype=torch.long)
    positions, ratios = torch.zeros(batch, frames, dtype=torch.long), torch.zeros(batch, frames, dtype=torch.long)
    pixels = noise((batch, frames, 1, 3, SIDE, SIDE), 4)
    for sample, own in enumerate(places):
        valid[sample, length - case.get("padding", [0] * batch)[sample] :] = 0
        pixels[sample, len(own) :] = 0
        for frame, place in enumerate(own):
            ids[sample, place], positions[sample, frame], ratios[sample, frame] = IMAGE, place, 1
            mask[sample, place:, frame] = 1
    if "silence_token_id" in case:
        ids[:, 8] = ids[0, 10] = SILENCE
    mask[valid == 0] = 0
    labels = ids.masked_fill((ids == IMAGE) | (valid == 0), -100)
    labels[:, :2] = -100
    images = {"pixel_values": pixels, "aspect_ratio_ids": ratios}
    images |= {"aspect_ratio_mask": torch.ones(batch, frames, 1, dtype=torch.long)}
    found = {"input_ids": ids, "attention_mask": valid, "labels": labels}
    found |= {"cross_attention_mask": mask, "vision_position_ids": positions}
    found |= {} if "pixels" in case.get("without", ()) else images
    return {name: x for name, x in found.items() if name not in case.get("without", ())}


def shown_logits(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return every ninth logit of three rows of each sample that are no padding."""
    rows = [(0, count // 2, count - 1) for count in inputs["attention_mask"].sum(1).tolist()]
    return torch.stack([logits[sample, row, ::9] for sample, own in enumerate(rows) for row in own]).detach()


def shown_gradient(name: str, gradient: Tensor) -> float:
    """Return the product of the gradient of a published name with noise, in units of its length."""
    return float((gradient.double() * noise(gradient.shape, 1 + seed_of(name)).double()).sum())
