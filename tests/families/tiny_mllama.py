"""A tiny Llama 3.2 Vision for tests: the real class, random weights, and nothing left at a value that hides a mistake.

Inputs have the form that the real processor gives them: images padded to as many as the longest sample has, tiles
padded to as many as the model takes, and a mask by image and tile that rows before the first image see nothing of.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from harness import FamilyCase
from torch import Tensor
from transformers import MllamaConfig, MllamaForConditionalGeneration
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

from mllm_seqpar import FrameShard, frame_range

VOCABULARY = 96
IMAGE = VOCABULARY  # the first of the eight rows that only the embedding has
TILES = 3
PATCHES = 5  # of a tile of 28 x 28: four and the class embedding
ASPECT_RATIOS = [[1, 1], [1, 2], [1, 3], [2, 1], [3, 1]]
CROSS_LAYERS = (1, 3)


def tiny_config(**text: Any) -> MllamaConfig:
    """5 layers of width 64, of which 1 and 3 look at images; 4 heads over 2 KV heads of 16; 3 tiles of 5 patches."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": list(CROSS_LAYERS),
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    fields |= {name: list(value) if isinstance(value, tuple) else value for name, value in text.items()}
    vision = MllamaVisionConfig(
        hidden_size=32,
        attention_heads=2,
        intermediate_size=48,
        num_hidden_layers=3,
        num_global_layers=2,
        vision_output_dim=96,
        image_size=28,
        patch_size=14,
        max_num_tiles=TILES,
        intermediate_layers_indices=[0, 2],
        supported_aspect_ratios=ASPECT_RATIOS,
    )
    return MllamaConfig(vision_config=vision, text_config=MllamaTextConfig(**fields), image_token_index=IMAGE)


def tiny_mllama(seed: int = 0, **text: Any) -> Any:
    """A model in eval mode. No gate is zero, no norm is ones, and attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = MllamaForConditionalGeneration(tiny_config(**text)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "gate" in name and weight.numel() == 1:
                weight.copy_(0.8 + 0.2 * noise)
            elif weight.dim() == 1 and name.endswith("weight"):  # norms
                weight.copy_(1 + 0.2 * noise)
            elif weight.dim() == 1:
                weight.copy_(0.2 * noise)
            elif "embed" in name and "patch_embedding" not in name:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise * weight[0].numel() ** -0.5)
    return model


@dataclass(frozen=True)
class Case(FamilyCase):
    """With the choices of this family.

    Attributes:
        images: tiles of each image of each sample: ((3, 1), (2,)) are two samples with two images and one.
        padding: "left", "right" or None: every sample after the first is shorter by 2 more tokens.
        mask: "processor": as the real one makes it; "scattered": rows see any tiles at all; "none": no mask, and
            eager attention: unpatched, sdpa takes the tiles for text then, and lets no row see a later key.
        features: `cross_attention_states` in place of pixels: "tiles" of them, or all of a "sample" in one.
        embeds: `inputs_embeds` in place of `input_ids`.
        targets: "usual", "shifted" (`shift_labels`) or "few" (the last two tokens only).
    """

    images: tuple[tuple[int, ...], ...] = ((3, 1, 2),)  # type: ignore[assignment]
    mask: str = "processor"
    features: str | None = None
    embeds: bool = False
    targets: str = "usual"

    def real(self) -> Tensor | None:
        """(B, L) bool, the real tokens of a padded batch."""
        left = super().real()
        return left.flip(1) if left is not None and self.padding == "right" else left


def fresh_model() -> Any:
    """A new model to be trained."""
    return tiny_mllama().train()


def shard_units(model: Any) -> list[Any]:
    """What FSDP2 shards as units: decoder layers, the layers of both encoders."""
    vision = model.model.vision_model
    return [*model.model.language_model.layers, *vision.transformer.layers, *vision.global_transformer.layers]


lora_targets = r"model\.language_model\.layers\.\d+\.(self|cross)_attn\.(q|k|v|o)_proj"


@functools.cache
def _kept(overrides: tuple[tuple[str, Any], ...]) -> Any:
    return tiny_mllama(**dict(overrides))


def model_of(case: Case) -> Any:
    """The case's model, kept between cases: patching it must leave no trace."""
    model = _kept(tuple(sorted(case.model.items())))
    vars(model).pop("_previous_max_cache_length", None)  # of static caches, which ranks had in other cases or not
    model.set_attn_implementation("eager" if case.mask == "none" else "sdpa")
    model.zero_grad(set_to_none=True)
    return model.eval()


def inputs_of(case: Case, model: Any) -> dict[str, Any]:
    """The arguments of the unpatched model's forward."""
    generator = torch.Generator().manual_seed(11)
    samples, length = len(case.images), case.length
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    places = [torch.randperm(max(length - 4, 1), generator=generator)[: len(tiles)] + 1 for tiles in case.images]
    valid = torch.ones_like(ids)
    for sample in range(samples if case.padding else 0):
        valid[sample, : 2 * sample] = 0
    starts = [place.sort().values + (2 * sample if case.padding else 0) for sample, place in enumerate(places)]
    for sample, start in enumerate(starts):
        start.clamp_(max=length - 1)
        ids[sample, start] = IMAGE
    ids.masked_fill_(valid == 0, 0)
    seen = _mask(case, starts, valid, generator)
    if case.padding == "right":
        ids, valid, seen = ids.flip(1), valid.flip(1), seen.flip(1)  # what the rows see stays any mask at all
    inputs: dict[str, Any] = {"input_ids": ids, **case.arguments}
    if case.padding:
        inputs["attention_mask"] = valid
    if any(case.images):
        inputs |= _images(case, generator)
        if case.mask != "none":
            inputs["cross_attention_mask"] = seen
    if case.labels:
        labels = ids.masked_fill((valid == 0) | (ids == IMAGE), -100)
        labels[:, : 2 if case.targets != "few" else -2] = -100
        inputs["labels"] = labels
        if case.targets == "shifted":  # unpatched wants both, and looks at these
            inputs["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
            inputs["labels"] = torch.full_like(labels, 7)
    if case.embeds:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    if case.features and any(case.images):
        inputs = with_features(model, inputs)
        if case.features == "sample":
            inputs["cross_attention_states"] = inputs["cross_attention_states"].reshape(samples, -1, 64)
    for name in case.wants_grad:
        inputs[name].requires_grad_()
    return inputs


def _mask(case: Case, starts: list[Tensor], valid: Tensor, generator: torch.Generator) -> Tensor:
    """(B, L, images, tiles): an image is seen from its token to the next one's, as far as it has tiles."""
    most = max(1, *map(len, case.images))
    seen = torch.zeros(*valid.shape, most, TILES, dtype=torch.long)
    for sample, tiles in enumerate(case.images):
        for image, count in enumerate(tiles):
            stop = int(starts[sample][image + 1]) if image + 1 < len(tiles) else case.length
            seen[sample, int(starts[sample][image]) : stop, image, :count] = 1
    if case.mask == "scattered":
        seen = (torch.rand(seen.shape, generator=generator) < 0.4).long()
        seen[:, torch.rand(case.length, generator=generator) < 0.3] = 0
    return seen


def _images(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Pixels, and aspect ratios, which tell padding tiles from others; a padding image has ratio 0 and one tile."""
    samples, most = len(case.images), max(map(len, case.images))
    pixels = torch.zeros(samples, most, TILES, 3, 28, 28)
    ratio_ids = torch.zeros(samples, most, dtype=torch.long)
    ratio_mask = torch.zeros(samples, most, TILES, dtype=torch.long)
    ratio_mask[:, :, 0] = 1
    for sample, tiles in enumerate(case.images):
        for image, count in enumerate(tiles):
            pixels[sample, image, :count] = torch.randn(count, 3, 28, 28, generator=generator)
            ratio_ids[sample, image] = ASPECT_RATIOS.index([1, count]) + 1
            ratio_mask[sample, image, :count] = 1
    return {"pixel_values": pixels, "aspect_ratio_ids": ratio_ids, "aspect_ratio_mask": ratio_mask}


def with_features(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with the images encoded beforehand: (B * images * tiles, patches, C)."""
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    with torch.no_grad():
        states = model.model.vision_model(**{name: inputs[name] for name in names}).last_hidden_state
        states = model.model.multi_modal_projector(states).flatten(0, 2)
    rest = {name: value for name, value in inputs.items() if name not in names}
    return rest | {"cross_attention_states": states}


def local_frames(inputs: dict[str, Any], group: Any = None) -> dict[str, Any]:
    """The same inputs as a rank passes them that holds only its own images, or, of features, its own tiles."""
    if "cross_attention_states" in inputs:
        flat = {"cross_attention_states": inputs["cross_attention_states"].reshape(-1, PATCHES, 64)}
    else:
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        flat = {name: inputs[name].flatten(0, 1) for name in names}
    total = next(iter(flat.values())).shape[0]
    own = frame_range(total, group)
    mine = {name: x[own.start : own.stop] for name, x in flat.items()}
    return inputs | mine | {"visual_shard": FrameShard(own.start, own.stop, total)}


def unpatched_generate(model: Any, **inputs: Any) -> Tensor:
    """What `generate` of the unpatched model would give, where it fails over its cache, by a way that it can go.

    It looks up tokens in the prompt only without images (taking back a rejected token would cut off tiles, too), and
    adds `cross_attention_states` to the cache with every token. Older ones have no room for tiles in a static cache.
    """
    if "_prepare_static_cache" not in vars(type(model)):
        inputs.pop("cache_implementation", None)
    if "pixel_values" in inputs:
        inputs.pop("prompt_lookup_num_tokens", None)
    if "cross_attention_states" in inputs:
        inputs["use_cache"] = False
    return model.generate(**inputs)
