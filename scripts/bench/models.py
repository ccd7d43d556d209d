"""The models of the benchmarks: `tiny_models` in two kinds of sizes, with random weights.

- `subject`: a model and the arguments of its `generate`, for times. With `SMALL`, the language model has width 512 and
  8 layers, two of them with cross-attention: the width is an eighth of the published one, so the time to project K and
  V of the images for one token keeps about its published proportion to the other work of that token. With `HOST`, it
  has 40 layers of width 64, so the time is that of the host. A token of OpenFlamingo attends to the last image before
  it, those of other families attend to all images.
- `scaled`: a model of `configs/models` with all widths divided by one number, for bytes. The numbers of heads, of
  tokens per frame and of cross-attention layers stay, so the visual features, K and V of a frame keep their published
  proportions. The frames of MOSS-VL may have another number of tokens. There are fewer decoder layers without cross-
  attention and a smaller vocabulary; no byte that grows with the video depends on these. A step starts at visual
  features that require a gradient, as the output of a trained projector or resampler does. The vision tower is not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from harness import synchronize
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from mllm_seqpar import FrameShard
from mllm_seqpar.planner.model_sizes import ModelSizes, read_model
from tiny_models import Sizes, tiny_model

WORDS = range(256, 1024)
"""Token ids of words; those of images, and other special tokens, are smaller."""
MEDIA = {"mplug_owl3": 255, "open_flamingo": 60, "moss_vl": 95}
"""The token that stands for an image, of the families that have one."""
FEATURES = {"mplug_owl3": "image_embeds", "open_flamingo": "vision_x", "idefics": "perceiver_embeddings"}
FEATURES |= {"mllama": "cross_attention_states", "moss_vl": "visual_embeds"}
"""The argument of forward that takes visual features."""
LATENTS = 64
"""Tokens of an image behind the resamplers of IDEFICS and OpenFlamingo."""
Inputs = dict[str, Any]

SMALL = Sizes(
    width=512,
    mlp=2048,
    layers=8,
    heads=8,
    kv_heads=2,
    cross_layers=(1, 5),
    image=112,
    tower_width=160,
    tower_mlp=640,
    tower_layers=2,
    resampler_head_dim=40,
)
HOST = Sizes(
    width=64,
    mlp=128,
    layers=40,
    heads=4,
    kv_heads=2,
    cross_layers=tuple(range(3, 40, 5)),
    tower_width=64,
    tower_mlp=64,
    resampler_head_dim=16,
)
"""A fifth of the layers has cross-attention, as in Llama 3.2 Vision."""


@dataclass(frozen=True)
class Subject:
    """A model and the arguments of its `generate`."""

    model: Any
    inputs: dict[str, Tensor]
    keys: int  # number of visual keys of each cross-attention layer
    unpatched_generate: Callable[..., Tensor] | None = None  # if the unpatched model's does not work as published

    def to(self, device: str) -> Subject:
        self.model.to(device)
        return replace(self, inputs={name: x.to(device) for name, x in self.inputs.items()})

    def decode(self, tokens: int, time_of: Callable[[], float], *, patched: bool) -> tuple[Tensor, list[float]]:
        """Generate exactly `tokens` greedy tokens; return them, and the seconds of the prompt and of every token but
        the first."""
        generate = (None if patched else self.unpatched_generate) or self.model.generate
        clock = _TokenTimes(time_of)
        greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = generate(**self.inputs, **greedy, use_cache=True, logits_processor=LogitsProcessorList([clock]))
        assert len(clock.times) == 1 + tokens
        return ids[:, -tokens:].cpu(), [after - before for before, after in pairwise(clock.times)]

    def labels(self) -> Tensor:
        ids = self.inputs["lang_x" if "lang_x" in self.inputs else "input_ids"]
        return ids.masked_fill(ids < WORDS.start, -100)


class _TokenTimes(LogitsProcessor):
    """Records when the scores of each token are computed."""

    def __init__(self, time_of: Callable[[], float]) -> None:
        self.times, self._time_of = [time_of()], time_of

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        synchronize(scores.device)
        self.times.append(self._time_of())
        return scores


SUBJECTS = ("mplug_owl3", "open_flamingo", "idefics", "mllama")


def subject(family: str, images: int, prompt: int, sizes: Sizes | None = None) -> Subject:
    """Return one of SUBJECTS with `images` images, followed by `prompt` words."""
    sizes = sizes or SMALL
    options = {"width": min(sizes.tower_width, 128)} if family == "open_flamingo" else {}
    model = tiny_model(family, sizes, **options)
    ids = _words(prompt)
    if family in MEDIA:
        ids = torch.cat([torch.full((1, images), MEDIA[family]), ids], dim=1)
    pixels = torch.randn(1, images, 3, sizes.image, sizes.image, generator=torch.Generator().manual_seed(2))
    patches = (sizes.image // 14) ** 2
    match family:
        case "mplug_owl3":
            return Subject(model, inputs_of(family, ids, images, pixel_values=pixels[0]), images * patches)
        case "idefics":
            return Subject(model, inputs_of(family, ids, images, pixel_values=pixels), images * LATENTS)
        case "open_flamingo":
            from tiny_models.open_flamingo import unpatched_generate

            inputs = inputs_of(family, ids, images, vision_x=pixels.unsqueeze(2))
            return Subject(model, inputs, images * LATENTS, partial(unpatched_generate, model))
    ones = partial(torch.ones, dtype=torch.long)  # images of one tile, which has one more key
    tiles = {"aspect_ratio_ids": ones(1, images), "aspect_ratio_mask": ones(1, images, 1)}
    tiles |= {"cross_attention_mask": ones(1, prompt, images, 1), "pixel_values": pixels.unsqueeze(2)}
    return Subject(model, inputs_of(family, ids, images, **tiles), images * (patches + 1))


def inputs_of(family: str, ids: Tensor, frames: int, **visual: Any) -> Inputs:
    """Return arguments of forward in which every token attends to all frames before it."""
    if family == "open_flamingo":
        return {"lang_x": ids, "attention_mask": torch.ones_like(ids), **visual}
    if family == "idefics":
        visual["image_attention_mask"] = ids.new_ones(1, ids.shape[1], frames)
    return {"input_ids": ids, **visual}


@dataclass(frozen=True)
class ScaledModel:
    """A model of `configs/models` with smaller widths: its sizes for the planner, and those of the model."""

    family: str
    sizes: ModelSizes
    model_sizes: Sizes

    def build(self) -> Any:
        """Return the model, with the same weights on every rank."""
        return tiny_model(
            self.family, self.model_sizes, **{"immediate": False} if self.family == "open_flamingo" else {}
        )

    def frame_tokens(self, frames: int) -> list[int]:
        """Return the visual tokens of each frame; by turns a quarter less and more than the mean in MOSS-VL."""
        mean = self.sizes.vision.keys
        quarter = mean // 4 if self.family == "moss_vl" else 0
        return [mean + quarter * (-1, 1)[number % 2] for number in range(frames)]

    def arguments(self, text: int, features: Tensor, shard: FrameShard) -> Inputs:
        """Return the arguments of forward for this rank's features, (f, tokens, width), or (tokens, width) in MOSS-VL:
        one placeholder per frame, then words; the second half has labels."""
        ids = _words(text)
        ids[:, : shard.total] = MEDIA.get(self.family, WORDS.start)
        labels = ids.clone()
        labels[:, : max(text // 2, shard.total)] = -100
        ids, labels = ids.to(features.device), labels.to(features.device)
        visual = {FEATURES[self.family]: features, "visual_shard": shard}
        if self.family == "moss_vl":  # each frame is an image one visual token high, 2 x 2 patches each
            grids = [(1, 2, 2 * (tokens - 1)) for tokens in self.frame_tokens(shard.total)]
            visual |= {"grid_thw": torch.tensor(grids), "media_nums_per_sample": [shard.total]}
            visual["cross_attention_mask"] = (ids == MEDIA[self.family]).long().cumsum(1)
        return inputs_of(self.family, ids, shard.total, labels=labels, **visual)


PUBLISHED = {
    "mplug_owl3": ("mplug-owl3-7b", 8, 2),
    "open_flamingo": ("open-flamingo-3b", 24, 1),
    "idefics": ("idefics-9b", 8, 1),
    "mllama": ("llama-3.2-11b-vision", 8, 2),
    "moss_vl": ("moss_vl_11b", 24, 2),
}
"""By family: the file of `configs/models`, the layers, and the distance of those with cross-attention."""


def scaled(family: str, scale: int, name: str = "", layers: int = 0, every: int = 0) -> ScaledModel:
    """Return a published model, all widths divided by `scale`; name, layers and distance as in PUBLISHED by default."""
    defaults = PUBLISHED[family]
    name, layers, every = name or defaults[0], layers or defaults[1], every or defaults[2]
    cross_layers = tuple(range(0 if family == "mplug_owl3" else every - 1, layers, every))
    sizes = scaled_sizes(name, scale, layers - (len(cross_layers) if family in ("mllama", "moss_vl") else 0))
    text, cross, resampler = sizes.text, sizes.cross, sizes.resampler
    # The MLPs of LLaMA are gated; those of MPT, which the published model uses, are not.
    if family == "open_flamingo":
        sizes = replace(sizes, text=replace(text, mlp_matrices=3))
    model_sizes = Sizes(
        width=text.hidden,
        mlp=text.mlp_inner,
        layers=layers,
        heads=text.heads,
        kv_heads=text.kv_heads,
        cross_layers=cross_layers,
        tower_width=cross.visual_dim if resampler else Sizes.tower_width,
        cross_heads=cross.heads,
        cross_head_dim=cross.head_dim,
        resampler_heads=resampler.heads if resampler else Sizes.resampler_heads,
        resampler_head_dim=resampler.head_dim if resampler else Sizes.resampler_head_dim,
    )
    return ScaledModel(family, sizes, model_sizes)


def scaled_sizes(name: str, scale: int, layers: int) -> ModelSizes:
    """Return the sizes of `configs/models/<name>.yaml` with all widths divided by `scale` and `layers` layers."""

    def divided(part: Any, *widths: str) -> Any:
        return part and replace(part, **{width: getattr(part, width) // scale for width in widths})

    model = read_model(name)
    return replace(
        model,
        text=replace(divided(model.text, "hidden", "head_dim", "mlp_inner"), layers=layers, vocabulary=WORDS.stop),
        cross=divided(model.cross, "head_dim", "visual_dim", "mlp_inner"),
        vision=divided(model.vision, "width", "mlp_inner"),
        resampler=divided(model.resampler, "head_dim", "mlp_inner"),
        projector=model.projector and tuple(channels // scale for channels in model.projector),
    )


def _words(count: int) -> Tensor:
    return torch.randint(WORDS.start, WORDS.stop, (1, count), generator=torch.Generator().manual_seed(1))
