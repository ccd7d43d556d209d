"""A tiny MOSS-Video-Preview: the native class with random weights. See `tiny_models`.

Inputs have the form that the processor gives them: samples are padded to the same number of frames, a row sees all
frames whose tokens are at or before it, and the position of a frame is that of its token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

from mllm_seqpar.models.video_mllama import VideoMllamaConfig, VideoMllamaForConditionalGeneration

from . import TinyCase, random_model
from .mllama import LORA_TARGETS, RULES, arguments_of, local_frames, shard_units, unpatched_generate
from .mllama import tiny_config as config_of_images

__all__ = ["LORA_TARGETS", "Case", "arguments_of", "inputs_of", "local_frames", "shard_units", "tiny_model"]
__all__ += ["unpatched_generate"]

VOCABULARY = 96
IMAGE = VOCABULARY  # only the embedding has a row for it
SIDE = 56  # a frame has 16 patches, which are pooled to four, and the class token, as many as a tile of `mllama`
_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE |= {"original_max_position_embeddings": 64}


def tiny_config(
    vision: Mapping[str, Any] | None = None,
    pool_mode: str | None = "average",
    stride: int | None = 2,
    silence_token_id: int | None = None,
    silence_token_weight: float = 1.0,
    **text: Any,
) -> VideoMllamaConfig:
    """Return a config: 5 layers of width 64 (1 and 3 cross-attention), 4 heads, 2 KV heads, 5 tokens a frame."""
    like = config_of_images(**{"rope_parameters": _ROPE} | text)
    tower = like.vision_config.to_dict() | {"image_size": SIDE, "max_num_tiles": 4, "supported_aspect_ratios": None}
    return VideoMllamaConfig(
        vision_config=MllamaVisionConfig(**tower | dict(vision or {})).to_dict(),
        text_config=MllamaTextConfig(**like.text_config.to_dict()).to_dict(),
        image_token_index=text.get("vocab_size", IMAGE),
        pool_mode=pool_mode,
        stride=stride,
        silence_token_id=silence_token_id,
        silence_token_weight=silence_token_weight,
    )


def tiny_model(seed: int = 0, attn_implementation: str = "sdpa", **config: Any) -> Any:
    """Return a model in eval mode; no gate is zero, and attention is far from uniform."""
    return random_model(VideoMllamaForConditionalGeneration, tiny_config(**config), RULES, seed, attn_implementation)


@dataclass(frozen=True)
class Case(TinyCase):
    """A batch of MOSS-Video-Preview; `features` is None, "frames" or "sample" (all frames in one row)."""

    frames: tuple[int, ...] = (3,)
    mask: str = "processor"  # a row sees the frames at or before it; "scattered": any frames; "none": no mask
    positions: bool = True  # whether the positions of frames are passed


def inputs_of(case: Case, model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    samples, length, most = len(case.frames), case.length, max(1, *case.frames)
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    real = case.real()
    valid = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    visible = torch.zeros(samples, length, most, 1, dtype=torch.long)
    positions = torch.zeros(samples, most, dtype=torch.long)
    for sample, count in enumerate(case.frames):
        inside = valid[sample].nonzero().flatten()
        places = inside[torch.randperm(max(len(inside) - 4, count), generator=generator)[:count] + 1].sort().values
        ids[sample, places], positions[sample, :count] = IMAGE, places
        for frame, place in enumerate(places):
            visible[sample, int(place) :, frame] = 1
    if case.mask == "scattered":
        visible = (torch.rand(visible.shape, generator=generator) < 0.4).long()
        visible[:, torch.rand(length, generator=generator) < 0.3] = 0
    ids[~valid], visible[~valid] = 0, 0
    inputs: dict[str, Any] = {"input_ids": ids, **case.arguments}
    if case.padding is not None:
        inputs["attention_mask"] = valid.long()
    if any(case.frames):
        inputs |= _images(case, generator) | ({"cross_attention_mask": visible} if case.mask != "none" else {})
        inputs |= {"vision_position_ids": positions} if case.positions else {}
    inputs |= case.targets(ids, ids == IMAGE)
    if "shift_labels" in inputs:  # the unpatched model requires labels too, and ignores their values
        inputs["labels"] = torch.full_like(ids, 7)
    if case.features and any(case.frames):
        with torch.no_grad():
            pixels, ratios = inputs.pop("pixel_values"), inputs.pop("aspect_ratio_ids")
            states = model.model.encode_frames(pixels, ratios)
        inputs["cross_attention_states"] = states.reshape(samples, -1, 64) if case.features == "sample" else states
        del inputs["aspect_ratio_mask"]
    return case.prepared(inputs, model)


def _images(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Return pixels and aspect ratios; a frame that pads a sample has ratio 0."""
    samples, most = len(case.frames), max(case.frames)
    pixels = torch.zeros(samples, most, 1, 3, SIDE, SIDE)
    ratio_ids = torch.zeros(samples, most, dtype=torch.long)
    for sample, count in enumerate(case.frames):
        pixels[sample, :count] = torch.randn(count, 1, 3, SIDE, SIDE, generator=generator)
        ratio_ids[sample, :count] = 1
    ratio_mask = torch.ones(samples, most, 1, dtype=torch.long)
    return {"pixel_values": pixels, "aspect_ratio_ids": ratio_ids, "aspect_ratio_mask": ratio_mask}
