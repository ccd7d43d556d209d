"""A tiny Llama 3.2 Vision: the real class with random weights. See `tiny_models`.

Inputs have the form that the real processor gives them: samples are padded to the same number of images, images to the
same number of tiles, and the mask lets a token before the first image see nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import MllamaConfig, MllamaForConditionalGeneration
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

from . import SPECIAL_TOKENS, Sizes, TinyCase, frame_shard, random_model

VOCABULARY = 96
IMAGE = VOCABULARY  # only the embedding has a row for it
TILES = 3
PATCHES = 5  # a tile of 28 x 28 has four and the class embedding
ASPECT_RATIOS = [[1, 1], [1, 2], [1, 3], [2, 1], [3, 1]]
CROSS_LAYERS = (1, 3)
RULES = {r"gate(_attn|_ffn)?$": (0.8, 0.2), "norm.*weight$": (1.0, 0.2), "bias$|class_embedding": (0.0, 0.2)}
RULES |= {"^(?!.*patch_embedding).*embed": (0.0, 0.5)}
PIXEL_INPUTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
LORA_TARGETS = r"model\.language_model\.layers\.\d+\.(self|cross)_attn\.(q|k|v|o)_proj"


def tiny_config(vision: Mapping[str, Any] | None = None, **text: Any) -> MllamaConfig:
    """Return a config: 5 layers of width 64 (1 and 3 cross-attention), 4 heads, 2 KV heads, 3 tiles of 5 patches."""
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}
    fields: dict[str, Any] = size | SPECIAL_TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 512}
    fields |= {"vocab_size": VOCABULARY, "cross_attention_layers": CROSS_LAYERS}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    fields |= text
    fields["cross_attention_layers"] = list(fields["cross_attention_layers"])
    tower = {"hidden_size": 32, "attention_heads": 2, "intermediate_size": 48, "vision_output_dim": 96}
    layers = {"num_hidden_layers": 3, "num_global_layers": 2, "intermediate_layers_indices": [0, 2]}
    images = {"image_size": 28, "patch_size": 14, "max_num_tiles": TILES, "supported_aspect_ratios": ASPECT_RATIOS}
    vision_config = MllamaVisionConfig(**tower | layers | images | (vision or {}))
    return MllamaConfig(vision_config=vision_config, text_config=MllamaTextConfig(**fields), image_token_index=IMAGE)


def arguments_of(sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of `tiny_model` for these sizes; images have one tile."""
    tower = {"hidden_size": sizes.tower_width, "attention_heads": sizes.tower_heads}
    tower |= {"vision_output_dim": 2 * sizes.tower_width, "intermediate_layers_indices": [0], "num_global_layers": 1}
    vision = sizes.tower | tower | {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    layers = {"num_key_value_heads": sizes.kv_heads, "cross_attention_layers": sizes.cross_layers}
    return sizes.text | layers | {"vision": vision}


def tiny_model(seed: int = 0, attn_implementation: str = "sdpa", **config: Any) -> Any:
    """Return a model in eval mode; no gate is zero, and attention is far from uniform."""
    return random_model(MllamaForConditionalGeneration, tiny_config(**config), RULES, seed, attn_implementation)


@dataclass(frozen=True)
class Case(TinyCase):
    """A batch of Llama 3.2 Vision; `features` is None, "tiles" or "sample" (the tiles of a sample in one row).

    `mask` is "processor" (that of the processor), "scattered" (a token sees any tiles) or "none". The unpatched model
    then needs eager attention, because sdpa applies a causal mask to the tiles.
    """

    frames: tuple[tuple[int, ...], ...] = ((3, 1, 2),)  # the tiles of each image of each sample
    mask: str = "processor"

    def model_overrides(self) -> dict[str, Any]:
        return dict(self.model) | ({"attn_implementation": "eager"} if self.mask == "none" else {})


def inputs_of(case: Case, model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    samples, length, padded = len(case.frames), case.length, case.padding is not None
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    places = [torch.randperm(max(length - 4, 1), generator=generator)[: len(tiles)] + 1 for tiles in case.frames]
    starts = [place.sort().values + 2 * sample * padded for sample, place in enumerate(places)]
    real = case.real()
    valid = torch.ones_like(ids) if real is None else real.long()
    if case.padding == "right":  # the batch is built with left padding and reversed below
        valid = valid.flip(1)
    for sample, start in enumerate(starts):
        start.clamp_(max=length - 1)
        ids[sample, start] = IMAGE
    ids.masked_fill_(valid == 0, 0)
    visible = _mask(case, starts, valid, generator)
    if case.padding == "right":
        ids, valid, visible = ids.flip(1), valid.flip(1), visible.flip(1)
    inputs: dict[str, Any] = {"input_ids": ids, **case.arguments}
    if padded:
        inputs["attention_mask"] = valid
    if any(case.frames):
        inputs |= _images(case, generator) | ({"cross_attention_mask": visible} if case.mask != "none" else {})
    inputs |= case.targets(ids, ids == IMAGE)
    if "shift_labels" in inputs:  # the unpatched model requires labels too, and ignores their values
        inputs["labels"] = torch.full_like(ids, 7)
    if case.features and any(case.frames):  # encoded images (batch * images * tiles, patches, C) replace the pixels
        with torch.no_grad():
            states = model.model.vision_model(**{name: inputs.pop(name) for name in PIXEL_INPUTS}).last_hidden_state
            states = model.model.multi_modal_projector(states).flatten(0, 2)
        inputs["cross_attention_states"] = states.reshape(samples, -1, 64) if case.features == "sample" else states
    return case.prepared(inputs, model)


def _mask(case: Case, starts: list[Tensor], valid: Tensor, generator: torch.Generator) -> Tensor:
    """Return (B, L, images, tiles): an image's tiles are visible from its token to the next image's."""
    most = max(1, *map(len, case.frames))
    visible = torch.zeros(*valid.shape, most, TILES, dtype=torch.long)
    for sample, tiles in enumerate(case.frames):
        for image, count in enumerate(tiles):
            stop = int(starts[sample][image + 1]) if image + 1 < len(tiles) else case.length
            visible[sample, int(starts[sample][image]) : stop, image, :count] = 1
    if case.mask == "scattered":
        visible = (torch.rand(visible.shape, generator=generator) < 0.4).long()
        visible[:, torch.rand(case.length, generator=generator) < 0.3] = 0
    return visible


def _images(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Return pixels and aspect ratios, which mark padding tiles; a padding image has ratio 0 and one tile."""
    samples, most = len(case.frames), max(map(len, case.frames))
    pixels = torch.zeros(samples, most, TILES, 3, 28, 28)
    ratio_ids = torch.zeros(samples, most, dtype=torch.long)
    ratio_mask = torch.zeros(samples, most, TILES, dtype=torch.long)
    ratio_mask[:, :, 0] = 1
    for sample, tiles in enumerate(case.frames):
        for image, count in enumerate(tiles):
            pixels[sample, image, :count] = torch.randn(count, 3, 28, 28, generator=generator)
            ratio_ids[sample, image] = ASPECT_RATIOS.index([1, count]) + 1
            ratio_mask[sample, image, :count] = 1
    return {"pixel_values": pixels, "aspect_ratio_ids": ratio_ids, "aspect_ratio_mask": ratio_mask}


def local_frames(inputs: dict[str, Any], group: Any = None, layout: str = "contiguous") -> dict[str, Any]:
    """Return the same inputs for a rank that passes only its images, or only its tiles of encoded images."""
    if "cross_attention_states" in inputs:
        frames = {"cross_attention_states": inputs["cross_attention_states"].reshape(-1, PATCHES, 64)}
    else:
        frames = {name: inputs[name].flatten(0, 1) for name in PIXEL_INPUTS}
    return frame_shard(inputs, frames, group, layout)


def shard_units(model: Any) -> list[Any]:
    vision = model.model.vision_model
    return [*model.model.language_model.layers, *vision.transformer.layers, *vision.global_transformer.layers]


def unpatched_generate(model: Any, **inputs: Any) -> Tensor:
    """Return the tokens of the unpatched model; where it fails over its cache, those of an equal call that works.

    Prompt lookup works only without images, because taking back a rejected token cuts off tiles too. With
    `cross_attention_states`, each token adds them to the cache again. Old versions cannot keep tiles in a static cache.
    """
    if "_prepare_static_cache" not in vars(type(model)):
        inputs.pop("cache_implementation", None)
    if "pixel_values" in inputs:
        inputs.pop("prompt_lookup_num_tokens", None)
    if "cross_attention_states" in inputs:
        inputs["use_cache"] = False
    return model.generate(**inputs)
