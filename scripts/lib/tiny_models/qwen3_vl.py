"""A tiny Qwen3-VL: the real class with random weights. See `tiny_models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from . import SPECIAL_TOKENS, random_model
from .qwen2_5_vl import (
    LORA_TARGETS,
    TEXT,
    TOKENS,
    VISION,
    inputs_of,
    local_frames,
    unpatched_forward,
    unpatched_generate,
)
from .qwen2_5_vl import Case as VideoCase

__all__ = ["LORA_TARGETS", "Case", "inputs_of", "local_frames", "shard_units", "tiny_model"]
__all__ += ["unpatched_forward", "unpatched_generate"]


def tiny_config(deepstack: tuple[int, ...] = (0, 2), **text: Any) -> Qwen3VLConfig:
    """Return a config: 4 layers of width 64, 4 heads, 2 KV heads; a tower of 4 layers, two of them with deepstack."""
    fields: dict[str, Any] = TEXT | SPECIAL_TOKENS | {"head_dim": 16}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    tower = VISION | {"depth": 4, "deepstack_visual_indexes": list(deepstack), "num_position_embeddings": 16}
    return Qwen3VLConfig(vision_config=tower, text_config=fields | text, **TOKENS)


def tiny_model(seed: int = 0, attn_implementation: str = "sdpa", **text: Any) -> Any:
    """Return a model in eval mode; attention is far from uniform."""
    rules = {"norm.*weight$": (1.0, 0.2), "bias$": (0.0, 0.2), "embed": (0.0, 0.5)}
    return random_model(Qwen3VLForConditionalGeneration, tiny_config(**text), rules, seed, attn_implementation)


@dataclass(frozen=True)
class Case(VideoCase):
    """A batch of Qwen3-VL, whose text has a timestamp before each temporal patch of a video."""

    timestamps: bool = True


def shard_units(model: Any) -> list[Any]:
    visual = model.model.visual
    return [*model.model.language_model.layers, *visual.blocks, *visual.deepstack_merger_list]
