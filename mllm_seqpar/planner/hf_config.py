"""A model's sizes from the `config.json` of a Hugging Face directory, for the families that are known.

Read as JSON, with the defaults of the configuration classes, so that no model library is needed to plan for one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import ConfigError

from .model import CrossAttentionSizes, ModelSizes, ResamplerSizes, TextSizes, VisionSizes

Config = dict[str, Any]

_SO400M: Config = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "image_size": 384,
    "patch_size": 14,
}


def read_hf_config(path: Path) -> ModelSizes:
    """The sizes of a model directory, or of its `config.json`.

    Raises:
        ConfigError: no such file, no JSON, or a family that is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model: there is no {file}; give a model's directory, its config.json or a model file")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"model: {file} is not JSON: {error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _FAMILIES:
        raise ConfigError(f"model: {file} has model_type {kind!r}; known are {', '.join(sorted(_FAMILIES))}")
    try:
        return _FAMILIES[kind](config, file.resolve().parent.name)
    except KeyError as error:
        raise ConfigError(f"model: {file} lacks {error}, which a {kind} model needs") from error
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"model: {file} has values that a {kind} model cannot have: {error}") from error


def _mplug_owl3(config: Config, name: str) -> ModelSizes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    tower = config.get("vision_config")
    vision = _siglip(_SO400M if tower is None else tower)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": config.get("head_dim") or hidden // heads}
    return ModelSizes(
        name=name,
        text=TextSizes(
            hidden=hidden,
            layers=config["num_hidden_layers"],
            **shape,
            mlp_inner=config["intermediate_size"],
            mlp_matrices=3,
            vocabulary=config["vocab_size"],
            tied_embeddings=config.get("tie_word_embeddings", False),
        ),
        cross=CrossAttentionSizes(
            layers=len(config.get("hyper_layers", (1, 9, 17, 25))),
            **shape,
            visual_dim=hidden,
            own_queries=False,
            features_norm=True,
            gate="none" if config.get("gate", "per_head") in (None, "vector") else "per_head",
        ),
        vision=vision,
        projector=(vision.width, *(config.get("projector_layers") or 1) * (hidden,)),
    )


def _siglip(config: Config) -> VisionSizes:
    side = config.get("image_size", 224) // config.get("patch_size", 16)
    return VisionSizes(
        width=config.get("hidden_size", 768),
        layers=config.get("num_hidden_layers", 12),
        heads=config.get("num_attention_heads", 12),
        mlp_inner=config.get("intermediate_size", 3072),
        tokens=side**2,
        keys=side**2,
    )


def _idefics(config: Config, name: str) -> ModelSizes:
    hidden, heads = config.get("hidden_size", 4096), config.get("num_attention_heads", 32)
    inner = config.get("intermediate_size", 11008)
    tower, perceiver = config.get("vision_config") or {}, config.get("perceiver_config") or {}
    width: int = tower.get("embed_dim") or config.get("vision_embed_dim") or 768
    patches = (tower.get("image_size", 224) // tower.get("patch_size", 14)) ** 2 + 1
    latents = config.get("use_resampler", False)
    layers = config.get("num_hidden_layers", 32)
    shape = {"heads": heads, "kv_heads": heads, "head_dim": hidden // heads}
    return ModelSizes(
        name=name,
        text=TextSizes(
            hidden=hidden,
            layers=layers,
            **shape,
            mlp_inner=inner,
            mlp_matrices=3,
            vocabulary=config.get("vocab_size", 32000),
            tied_embeddings=config.get("tie_word_embeddings", False),
            norm="mixed",
        ),
        cross=CrossAttentionSizes(
            layers=-(-layers // config.get("cross_layer_interval", 1)),
            **shape,
            visual_dim=width,
            mlp_inner=inner,
            mlp_matrices=3,
            key_norm="mixed" if config.get("qk_layer_norms") else "none",
        ),
        vision=VisionSizes(
            width=width,
            layers=tower.get("num_hidden_layers", 32),
            heads=tower.get("num_attention_heads", 16),
            mlp_inner=tower.get("intermediate_size", 5120),
            tokens=patches,
            keys=perceiver.get("resampler_n_latents", 64) if latents else patches,
            outputs_held=2,
        ),
        resampler=ResamplerSizes(
            layers=perceiver.get("resampler_depth", 6),
            heads=perceiver.get("resampler_n_heads", 16),
            head_dim=perceiver.get("resampler_head_dim", 96),
            mlp_inner=4 * width,
            code="idefics",
        )
        if latents
        else None,
    )


def _mllama(config: Config, name: str) -> ModelSizes:
    text, tower = config.get("text_config") or {}, config.get("vision_config") or {}
    hidden, heads = text.get("hidden_size", 4096), text.get("num_attention_heads", 32)
    inner = text.get("intermediate_size", 14336)
    width = tower.get("hidden_size", 1280)
    patches = (tower.get("image_size", 448) // tower.get("patch_size", 14)) ** 2 + 1
    tiles = tower.get("max_num_tiles", 4)  # the processor pads every picture to so many
    crossing = len(text.get("cross_attention_layers") or (3, 8, 13, 18, 23, 28, 33, 38))
    kv_heads = text.get("num_key_value_heads", 8)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads}
    return ModelSizes(
        name=name,
        text=TextSizes(
            hidden=hidden,
            layers=text.get("num_hidden_layers", 40) - crossing,
            **shape,
            mlp_inner=inner,
            mlp_matrices=3,
            vocabulary=text.get("vocab_size", 128256),
            tied_embeddings=text.get("tie_word_embeddings", False),
        ),
        cross=CrossAttentionSizes(
            layers=crossing, **shape, visual_dim=hidden, mlp_inner=inner, mlp_matrices=3, key_norm="float32"
        ),
        vision=VisionSizes(
            width=width,
            layers=tower.get("num_hidden_layers", 32) + tower.get("num_global_layers", 8),
            heads=tower.get("attention_heads", 16),
            mlp_inner=tower.get("intermediate_size", 5120),
            tokens=tiles * (patches + -patches % 8),  # the tower fills up every tile
            keys=tiles * patches,
            tiles=tiles,
            outputs_held=tower.get("num_hidden_layers", 32) + tower.get("num_global_layers", 8),
        ),
        projector=(tower.get("vision_output_dim", 7680), hidden),
    )


def _open_flamingo(config: Config, name: str) -> ModelSizes:
    text, tower = config["text_config"], config.get("vision_config") or {}
    hidden = text.get("hidden_size") or text["d_model"]
    layers = text.get("num_hidden_layers") or text["n_layers"]
    heads = text.get("num_attention_heads") or text["n_heads"]
    kind = text.get("model_type")
    gated = kind == "llama"
    inner = text.get("intermediate_size") or text.get("ffn_dim") or text.get("expansion_ratio", 4) * hidden
    width = tower.get("hidden_size", 768)
    return ModelSizes(
        name=name,
        text=TextSizes(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=hidden // heads,
            mlp_inner=inner,
            mlp_matrices=3 if gated else 2,
            vocabulary=text["vocab_size"],
            tied_embeddings=text.get("tie_word_embeddings", kind in ("mpt", "opt")),
        ),
        # the package's own constants: 8 heads of 64, MLPs four times as wide, 64 latents in 6 layers
        cross=CrossAttentionSizes(
            layers=layers // config.get("cross_attn_every_n_layers", 1),
            heads=8,
            kv_heads=8,
            head_dim=64,
            visual_dim=width,
            mlp_inner=4 * hidden,
            mlp_matrices=2,
        ),
        vision=VisionSizes(
            width=width,
            layers=tower.get("num_hidden_layers", 12),
            heads=tower.get("num_attention_heads", 12),
            mlp_inner=tower.get("intermediate_size", 3072),
            tokens=(tower.get("image_size", 224) // tower.get("patch_size", 32)) ** 2 + 1,
            keys=64,
        ),
        resampler=ResamplerSizes(layers=6, heads=8, head_dim=64, mlp_inner=4 * width),
    )


_FAMILIES: dict[str, Callable[[Config, str], ModelSizes]] = {
    "mplugowl3": _mplug_owl3,
    "idefics": _idefics,
    "mllama": _mllama,
    "open_flamingo": _open_flamingo,
}
