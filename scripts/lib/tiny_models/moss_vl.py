"""A tiny MOSS-VL: the real classes with random weights. See `tiny_models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar import FrameShard
from mllm_seqpar.models.moss_vl import MossVLConfig, MossVLForConditionalGeneration

from . import SPECIAL_TOKENS, Sizes, TinyCase, random_model

VOCABULARY = 96
START, END, IMAGE, VIDEO = 92, 93, 94, 95
FIRST, LAST = 3, 91
"""The range of token ids of text."""
PATCH, MERGE = 4, 2
LORA_TARGETS = r"model\.language_model\.layers\.\d+\.(self|cross)_attn\.(q|k|v|o)_proj"
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 16}
TEXT |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 2048}
VISION = {"hidden_size": 32, "intermediate_size": 48, "depth": 4, "num_heads": 2, "patch_size": PATCH, "in_channels": 3}
VISION |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1, 2], "temporal_patch_size": 1}
VISION |= {"spatial_merge_size": MERGE, "hidden_act": "gelu_pytorch_tanh"}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def tiny_config(vision: dict[str, Any] | None = None, **text: Any) -> MossVLConfig:
    """Return a config: 5 layers of width 64 (1 and 3 cross-attention), 4 heads, 2 KV heads; a tower of 4 layers."""
    fields: dict[str, Any] = TEXT | SPECIAL_TOKENS | {"cross_attention_layers": (1, 3), "rms_norm_eps": 1e-6}
    fields |= {"hidden_act": "silu", "rope_theta": 10000.0}
    fields["rope_scaling"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    fields |= text
    fields["cross_attention_layers"] = list(fields["cross_attention_layers"])
    tower = VISION | {"out_hidden_size": fields["hidden_size"]} | (vision or {})
    return MossVLConfig(text_config=fields, vision_config=tower, **TOKENS)


def arguments_of(sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of `tiny_model` for these sizes; a patch of the tower has 14 pixels, as elsewhere."""
    tower = {"hidden_size": sizes.tower_width, "num_heads": sizes.tower_heads, "depth": sizes.tower_layers}
    tower |= {"intermediate_size": sizes.tower_mlp, "patch_size": 14, "deepstack_visual_indexes": [0]}
    layers = {"num_key_value_heads": sizes.kv_heads, "cross_attention_layers": sizes.cross_layers}
    heads = {"head_dim": sizes.width // sizes.heads}
    return sizes.text | layers | heads | {"vision": tower}


def tiny_model(seed: int = 0, attn_implementation: str = "sdpa", **config: Any) -> Any:
    """Return a model in eval mode; no gate is closed, and attention is far from uniform."""
    rules = {"gate$": (0.8, 0.2), "norm.*weight$": (1.0, 0.2), "bias$|separator": (0.0, 0.2)}
    rules |= {"embed_tokens|pos_embed": (0.0, 0.5)}
    return random_model(MossVLForConditionalGeneration, tiny_config(**config), rules, seed, attn_implementation)


@dataclass(frozen=True)
class Case(TinyCase):
    """A batch of MOSS-VL.

    `frames` has the images and videos of each sample: (height, width) of an image in patches, or (time, height, width)
    of a video. `features` is None or "embeddings", those of the tower with separators, as `visual_embeds`.
    """

    frames: tuple[tuple[tuple[int, ...], ...], ...] = (((3, 4, 6), (6, 4)),)
    length: int = 19
    mask: str = "processor"  # bool, as the processor makes it; "counts": the frames of each row; "none": no mask


def frames_of(case: Case) -> list[int]:
    return [sum((1, *medium)[-3] for medium in media) for media in case.frames]


def inputs_of(case: Case, model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    samples, real = len(case.frames), case.real()
    ids = torch.randint(FIRST, LAST, (samples, case.length), generator=generator)
    valid = torch.ones_like(ids) if real is None else real.long()
    ids.masked_fill_(valid == 0, 0)
    for sample, count in enumerate(frames_of(case)):
        places = valid[sample].nonzero().flatten()
        chosen = torch.randperm(len(places) - 2, generator=generator)[:count] + 1
        ids[sample, places[chosen]] = IMAGE
    inputs: dict[str, Any] = {"input_ids": ids, **case.arguments} | case.targets(ids, ids == IMAGE)
    if real is not None:
        inputs["attention_mask"] = valid
    grids = [(1, *medium)[-3:] for media in case.frames for medium in media]
    if grids:
        grid = torch.tensor(grids)
        pixels = torch.randn(int(grid.prod(1).sum()), values_of(model), generator=generator)
        media = [len(media) for media in case.frames]
        inputs |= {"pixel_values": pixels, "grid_thw": grid, "media_nums_per_sample": media}
        if case.mask != "none":
            counts = (ids == IMAGE).long().cumsum(1) * valid
            table = counts[..., None] <= torch.arange(max(frames_of(case)))
            inputs["cross_attention_mask"] = counts if case.mask == "counts" else table[:, None]
    if case.features and grids:
        with torch.no_grad():
            inputs["visual_embeds"] = model.model.encode_frames(inputs.pop("pixel_values"), inputs["grid_thw"])
    return case.prepared(inputs, model)


def with_blank_images(inputs: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the inputs in the processor's form: each sample without media has an image of zeros, which is hidden."""
    samples = len(inputs["input_ids"])
    grid = inputs.get("grid_thw", torch.zeros(0, 3, dtype=torch.long))
    pixels, media = inputs.get("pixel_values", torch.zeros(0, values_of(model))), [0] * samples
    media = inputs.get("media_nums_per_sample", media)
    parts, grids = [], []
    for own in grid.split(media):
        patches, pixels = pixels.tensor_split([int(own.prod(1).sum())])
        parts.append(patches if len(own) else torch.zeros(16, values_of(model)))
        grids.append(own if len(own) else torch.tensor([[1, 4, 4]]))
    hidden = torch.ones(samples, 1, inputs["input_ids"].shape[1], 1, dtype=torch.bool)
    found = {"pixel_values": torch.cat(parts), "grid_thw": torch.cat(grids)}
    found["media_nums_per_sample"] = [max(1, count) for count in media]
    return inputs | found | {"cross_attention_mask": inputs.get("cross_attention_mask", hidden)}


def values_of(model: Any) -> int:
    return 3 * int(model.config.vision.patch_size) ** 2


def local_frames(inputs: dict[str, Any], group: Any = None, layout: str = "contiguous") -> dict[str, Any]:
    """Return the same inputs for a rank that passes only its frames, counted in the order of the text."""
    if "grid_thw" not in inputs:
        return inputs
    grid, name = inputs["grid_thw"], "pixel_values" if "pixel_values" in inputs else "visual_embeds"
    patches: Tensor = grid[:, 1:].prod(1).repeat_interleave(grid[:, 0])
    tokens = patches // MERGE**2 + 1
    frames = inputs[name].split((patches if name == "pixel_values" else tokens).tolist())
    shard = FrameShard.of(len(frames), group, layout, tokens)
    own = [frame for part in shard.ranges for frame in frames[part.start : part.stop]]
    return inputs | {name: torch.cat([inputs[name][:0], *own]), "visual_shard": shard}


def shard_units(model: Any) -> list[Any]:
    """Return the decoder layers and the layers of the vision tower; its merger takes the states of several of these."""
    return [*model.model.language_model.layers, *model.model.visual.blocks]
