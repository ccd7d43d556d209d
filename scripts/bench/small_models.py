"""The models of the benchmarks: the real class of each family with random weights, in the sizes of `Sizes`.

Every token attends to all images unless stated otherwise. The models of `SMALL` have a language model of width 512 with
8 layers, two of them with cross-attention: the width is an eighth of the published one, so the time to project K and V
of the images for one token keeps about its published proportion to the other work of that token. Those of `HOST` have
40 layers of width 64, so their time is that of the host.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WORDS = 1024
MEDIA = WORDS - 1  # the token that stands for an image
PATCH = 14
TEXT: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model: of its language model, its images and its vision tower.

    Attributes:
        cross: layers with cross-attention in Llama 3.2 Vision; the other families have them at the same distance.
        picture: height and width of an image, in pixels.
        patches: width of OpenFlamingo's tower, a linear map of patches.
    """

    width: int
    mlp: int
    layers: int
    heads: int
    cross: tuple[int, ...]
    picture: int
    tower_width: int
    tower_mlp: int
    tower_layers: int
    patches: int

    @property
    def text(self) -> dict[str, Any]:
        sizes = {"hidden_size": self.width, "intermediate_size": self.mlp}
        return TEXT | sizes | {"num_hidden_layers": self.layers, "num_attention_heads": self.heads}

    def tower(self, **names: str) -> dict[str, Any]:
        """Return the arguments of a tower's configuration; `names` are those that it has for width and heads."""
        sizes = {"image_size": self.picture, "patch_size": PATCH, "num_hidden_layers": self.tower_layers}
        sizes |= {"intermediate_size": self.tower_mlp}
        return sizes | {names["width"]: self.tower_width, names["heads"]: 4}


SMALL = Sizes(
    width=512,
    mlp=2048,
    layers=8,
    heads=8,
    cross=(1, 5),
    picture=112,
    tower_width=160,
    tower_mlp=640,
    tower_layers=2,
    patches=128,
)
HOST = Sizes(
    width=64,
    mlp=128,
    layers=40,
    heads=4,
    cross=tuple(range(3, 40, 5)),
    picture=28,
    tower_width=64,
    tower_mlp=64,
    tower_layers=1,
    patches=64,
)
"""A fifth of the layers has cross-attention, as in Llama 3.2 Vision."""


@dataclass(frozen=True)
class Subject:
    """A model and the arguments of its `generate`."""

    model: Any
    inputs: dict[str, Tensor]
    keys: int  # number of visual keys of each cross-attention layer
    unpatched_generate: Callable[..., Tensor] | None = None  # if the unpatched model's does not work as published


def idefics(images: int, prompt: int, sizes: Sizes | None = None) -> Subject:
    """Build IDEFICS with its resampler: 64 latents per image."""
    sizes = sizes or SMALL
    tower, interval = sizes.tower(width="embed_dim", heads="num_attention_heads"), sizes.cross[1] - sizes.cross[0]
    model = make_idefics(sizes.text, interval=interval, tower=tower, heads=4, head_dim=sizes.tower_width // 4)
    visible = torch.ones(1, prompt, images, dtype=torch.long)
    pixels = pictures(sizes, 1, images)
    inputs = {"input_ids": words(prompt), "image_attention_mask": visible, "pixel_values": pixels}
    return Subject(model, inputs, images * 64)


def open_flamingo(images: int, prompt: int, sizes: Sizes | None = None, *, immediate: bool = True) -> Subject:
    """Build OpenFlamingo over LLaMA: 64 latents per image; a token attends only to the last image before it."""
    sizes = sizes or SMALL
    every = sizes.cross[1] - sizes.cross[0]
    model = random_weights(make_flamingo(sizes.text, Patches(sizes.patches), sizes.patches, every=every))
    language_model = model.lang_encoder
    for block in filter(None, language_model.gated_cross_attn_layers):
        block.attn.only_attend_immediate_media = immediate
    ids = torch.cat([torch.full((1, images), MEDIA), words(prompt)], dim=1)
    inputs = {"vision_x": pictures(sizes, 1, images, 1), "lang_x": ids, "attention_mask": torch.ones_like(ids)}

    return Subject(model, inputs, images * 64, flamingo_generate(model))


def flamingo_generate(model: Any) -> Callable[..., Tensor]:
    """Return a `generate` for an unpatched Flamingo, whose own does not work with transformers 5."""
    language_model = model.lang_encoder

    def generate(vision_x: Tensor, lang_x: Tensor, **kwargs: Any) -> Tensor:
        """Pass `FlamingoLMMixin.forward` the mask it requires; transformers 5 omits a mask of ones."""
        forward = language_model.forward

        def with_mask(input_ids: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Any:
            if attention_mask is None:
                cache = rest.get("past_key_values")
                length = input_ids.shape[1] + (0 if cache is None else cache.get_seq_length())
                attention_mask = input_ids.new_ones(input_ids.shape[0], length)
            return forward(input_ids, attention_mask, **rest)

        language_model.forward = with_mask
        try:
            return model.generate(vision_x, lang_x, **kwargs)
        finally:
            del language_model.forward

    return generate


def mllama(images: int, prompt: int, sizes: Sizes | None = None) -> Subject:
    """Build Llama 3.2 Vision: a tile of patches and one more key per image; it has a visual KV cache unpatched, too."""
    sizes = sizes or SMALL
    tower = sizes.tower(width="hidden_size", heads="attention_heads") | {"vision_output_dim": 2 * sizes.tower_width}
    model = make_mllama(sizes.text, kv_heads=2, cross_layers=list(sizes.cross), tower=tower)
    inputs = {"input_ids": words(prompt), "pixel_values": pictures(sizes, 1, images, 1)}
    return Subject(model, inputs | tile_arguments(images, prompt), images * ((sizes.picture // PATCH) ** 2 + 1))


def tile_arguments(images: int, prompt: int) -> dict[str, Tensor]:
    """Return the arguments of Llama 3.2 Vision for images of one tile, all of which every token attends to."""
    ones = partial(torch.ones, dtype=torch.long)
    inputs = {"aspect_ratio_ids": ones(1, images), "aspect_ratio_mask": ones(1, images, 1)}
    return inputs | {"cross_attention_mask": ones(1, prompt, images, 1)}


def mplug_owl3(images: int, prompt: int, sizes: Sizes | None = None) -> Subject:
    """Build mPLUG-Owl3, whose keys are the patches; it has a visual KV cache unpatched, too."""
    sizes = sizes or SMALL
    tower = sizes.tower(width="hidden_size", heads="num_attention_heads")
    model = make_owl(sizes.text, kv_heads=2, hyper_layers=[layer + 1 for layer in sizes.cross], tower=tower)
    ids = torch.cat([torch.full((1, images), MEDIA), words(prompt)], dim=1)
    inputs = {"input_ids": ids, "pixel_values": pictures(sizes, images)}
    return Subject(model, inputs, images * (sizes.picture // PATCH) ** 2)


FAMILIES: dict[str, Callable[..., Subject]] = {
    "idefics": idefics,
    "open_flamingo": open_flamingo,
    "open_flamingo_all": partial(open_flamingo, immediate=False),  # tokens attend to all images before them
    "mllama": mllama,
    "mplug_owl3": mplug_owl3,
}


def make_idefics(text: dict[str, int], *, interval: int, tower: dict[str, Any], heads: int, head_dim: int) -> Any:
    """Return IDEFICS with cross-attention in every `interval`-th layer and a resampler of given heads."""
    from transformers import IdeficsConfig, IdeficsForVisionText2Text

    resampler = {"resampler_depth": 1, "resampler_n_heads": heads, "resampler_head_dim": head_dim}
    options = {"additional_vocab_size": 0, "qk_layer_norms": True, "alpha_type": "vector", "tie_word_embeddings": False}
    options |= {"cross_layer_interval": interval, "use_resampler": True}
    config = IdeficsConfig(**text, **options, vision_config=tower, perceiver_config=resampler)
    return random_weights(IdeficsForVisionText2Text(config))


def make_flamingo(text: dict[str, int], tower: nn.Module, visual_dim: int, *, every: int) -> Any:
    """Return OpenFlamingo over LLaMA with cross-attention before every `every`-th layer, as initialised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        import open_clip  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:  # open_flamingo imports it, but these models do not use it
        sys.modules["open_clip"] = types.ModuleType("open_clip")
    try:
        from open_flamingo import Flamingo
        from open_flamingo.src.flamingo_lm import FlamingoLMMixin
        from open_flamingo.src.utils import extend_instance
    except ImportError as error:
        raise SystemExit(
            f"{error}: run pip install --no-deps open-flamingo==2.0.1 (it pins an old torch), and install einops and "
            "einops-exts"
        ) from error
    language_model = LlamaForCausalLM(LlamaConfig(**text))
    extend_instance(language_model, FlamingoLMMixin)
    language_model.set_decoder_layers_attr_name("model.layers")
    encoder = types.SimpleNamespace(visual=tower)
    return Flamingo(encoder, language_model, WORDS - 2, MEDIA, visual_dim, cross_attn_every_n_layers=every)


def make_mllama(text: dict[str, int], *, kv_heads: int, cross_layers: list[int], tower: dict[str, Any]) -> Any:
    """Return Llama 3.2 Vision with images of one tile and one global layer in the tower."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

    layers = {"num_key_value_heads": kv_heads, "cross_attention_layers": cross_layers}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text_config = MllamaTextConfig(**text, **layers, rope_parameters=rope)
    tiles = {"num_global_layers": 1, "intermediate_layers_indices": [0]}
    tiles |= {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    config = MllamaConfig(
        vision_config=MllamaVisionConfig(**tower, **tiles), text_config=text_config, image_token_index=WORDS
    )
    return random_weights(MllamaForConditionalGeneration(config))


def make_owl(text: dict[str, int], *, kv_heads: int, hyper_layers: list[int], tower: dict[str, Any]) -> Any:
    from transformers import SiglipVisionConfig

    from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration

    options = {"gate": "per_head", "hyper_layers": hyper_layers, "num_key_value_heads": kv_heads}
    options |= {"image_token_id": MEDIA, "max_position_embeddings": 32768}
    config = MPlugOwl3Config(**text, **options, vision_config=SiglipVisionConfig(**tower))
    return random_weights(MPlugOwl3ForConditionalGeneration(config))


def words(count: int) -> Tensor:
    return torch.randint(3, WORDS - 2, (1, count), generator=torch.Generator().manual_seed(1))


def pictures(sizes: Sizes, *counts: int) -> Tensor:
    """Return pixels (*counts, 3, height, width)."""
    return torch.randn(*counts, 3, sizes.picture, sizes.picture, generator=torch.Generator().manual_seed(2))


def random_weights(model: Any) -> Any:
    """Set eval mode and weights that keep the scale of activations; open the gates, which are zero as initialised."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gate" in name and weight.dim() < 2 or "alpha" in name:
                weight.fill_(0.7)
            elif weight.dim() > 1:
                scale = 0.5 if "embed" in name else weight[0].numel() ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model.eval()


class Patches(nn.Module):
    """A linear map of patches, like open_clip: pixels (n, 3, H, W) -> pooled (n, width), tokens (n, patches, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, PATCH, stride=PATCH)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.project(pixels).flatten(2).transpose(1, 2)
        return tokens.mean(1), tokens
