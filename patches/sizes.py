"""The sizes of the models of each family from their `config.json`, for the planner; imported without torch.

`SIZES` lists them by the `model_type` of the file.
"""

from typing import Any

from mllm_seqpar.adapting import (
    CrossAttentionSizes,
    ModelSizes,
    ResamplerSizes,
    TextSizes,
    VisionSizes,
)

# The SigLIP tower of the published checkpoints, whose configurations have no `vision_config`.
_SO400M = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "image_size": 384,
    "patch_size": 14,
}


def mplug_owl3(config: dict[str, Any], name: str) -> ModelSizes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    shape = {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
    }
    tower = config["vision_config"] if config.get("vision_config") is not None else _SO400M
    patches = (tower.get("image_size", 224) // tower.get("patch_size", 16)) ** 2
    vision = VisionSizes(
        width=tower.get("hidden_size", 768),
        layers=tower.get("num_hidden_layers", 12),
        heads=tower.get("num_attention_heads", 12),
        mlp_inner=tower.get("intermediate_size", 3072),
        tokens=patches,
        keys=patches,
    )
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
            earlier_frames=True,
        ),
        vision=vision,
        projector=(vision.width, *(config.get("projector_layers") or 1) * (hidden,)),
    )


def mllama(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes; missing values have the defaults of transformers' `MllamaConfig`."""
    text, tower = config.get("text_config") or {}, config.get("vision_config") or {}
    hidden, heads = text.get("hidden_size", 4096), text.get("num_attention_heads", 32)
    inner = text.get("intermediate_size", 14336)
    patches = (tower.get("image_size", 448) // tower.get("patch_size", 14)) ** 2 + 1
    tiles = tower.get("max_num_tiles", 4)  # the processor pads every image to this many
    tower_layers = tower.get("num_hidden_layers", 32) + tower.get("num_global_layers", 8)
    cross_layers = len(text.get("cross_attention_layers") or (3, 8, 13, 18, 23, 28, 33, 38))
    shape = {"heads": heads, "kv_heads": text.get("num_key_value_heads", 8), "head_dim": hidden // heads}
    return ModelSizes(
        name=name,
        text=TextSizes(
            hidden=hidden,
            layers=text.get("num_hidden_layers", 40) - cross_layers,
            **shape,
            mlp_inner=inner,
            mlp_matrices=3,
            vocabulary=text.get("vocab_size", 128256),
            tied_embeddings=text.get("tie_word_embeddings", False),
        ),
        cross=CrossAttentionSizes(
            layers=cross_layers,
            **shape,
            visual_dim=hidden,
            mlp_inner=inner,
            mlp_matrices=3,
            key_norm="float32",
            earlier_frames=True,
        ),
        vision=VisionSizes(
            width=tower.get("hidden_size", 1280),
            layers=tower_layers,
            heads=tower.get("attention_heads", 16),
            mlp_inner=tower.get("intermediate_size", 5120),
            tokens=tiles * (patches + -patches % 8),  # the tower pads every tile to a multiple of 8
            keys=tiles * patches,
            tiles=tiles,
            outputs_held=tower_layers,
        ),
        projector=(tower.get("vision_output_dim", 7680), hidden),
    )


def idefics(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes; missing values have the defaults of transformers' `IdeficsConfig`."""
    hidden, heads = config.get("hidden_size", 4096), config.get("num_attention_heads", 32)
    inner, layers = config.get("intermediate_size", 11008), config.get("num_hidden_layers", 32)
    tower, perceiver = config.get("vision_config") or {}, config.get("perceiver_config") or {}
    width: int = tower.get("embed_dim") or config.get("vision_embed_dim") or 768
    patches = (tower.get("image_size", 224) // tower.get("patch_size", 14)) ** 2 + 1
    resampler = None
    if config.get("use_resampler", False):
        resampler = ResamplerSizes(
            layers=perceiver.get("resampler_depth", 6),
            heads=perceiver.get("resampler_n_heads", 16),
            head_dim=perceiver.get("resampler_head_dim", 96),
            mlp_inner=4 * width,
            code="idefics",
        )
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
            keys=perceiver.get("resampler_n_latents", 64) if resampler else patches,
            outputs_held=2,
        ),
        resampler=resampler,
    )


def open_flamingo(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes.

    The heads and widths of the cross-attention and of the resampler are constants of the package open-flamingo
    (`open_flamingo/src/helpers.py`).
    """
    text, tower = config["text_config"], config.get("vision_config") or {}
    hidden = text.get("hidden_size") or text["d_model"]
    layers = text.get("num_hidden_layers") or text["n_layers"]
    heads = text.get("num_attention_heads") or text["n_heads"]
    width, language_model = tower.get("hidden_size", 768), text.get("model_type")
    return ModelSizes(
        name=name,
        text=TextSizes(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=hidden // heads,
            mlp_inner=text.get("intermediate_size") or text.get("ffn_dim") or text.get("expansion_ratio", 4) * hidden,
            mlp_matrices=3 if language_model == "llama" else 2,
            vocabulary=text["vocab_size"],
            tied_embeddings=text.get("tie_word_embeddings", language_model in ("mpt", "opt")),
        ),
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


QWEN_IMAGE = 360, 640
"""(height, width) of an image unless the caller says how many tokens it has."""


def _qwen_vl(config: dict[str, Any], name: str, *, vision: dict[str, Any], head_norm: bool = False) -> ModelSizes:
    """Return the sizes; `vision` has what the configurations of the two vision towers do not have in common.

    Older files have the fields of the language model beside `vision_config` instead of in `text_config`.
    """
    text, tower = config.get("text_config") or config, config["vision_config"]
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    width, merge, patch = tower["hidden_size"], tower.get("spatial_merge_size", 2), tower["patch_size"]
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    sizes = ModelSizes(
        name=name,
        text=TextSizes(
            hidden=hidden,
            layers=text["num_hidden_layers"],
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or hidden // heads,
            mlp_inner=text["intermediate_size"],
            mlp_matrices=3,
            vocabulary=text["vocab_size"],
            tied_embeddings=tied,
            head_norm=head_norm,
        ),
        vision=VisionSizes(
            width=width,
            layers=tower["depth"],
            heads=tower["num_heads"],
            mlp_inner=tower["intermediate_size"],
            tokens=merge**2,
            keys=1,
            temporal_patch=tower.get("temporal_patch_size", 2),
            patch=patch,
            rotary=True,
            **vision,
        ),
        projector=(width * merge**2, width * merge**2, hidden),
    )
    return sizes.with_frame_tokens(sizes.tokens_of_image(*QWEN_IMAGE))


def qwen2_5_vl(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes; all layers of the vision tower but `fullatt_block_indexes` attend inside windows."""
    tower = config["vision_config"]
    window = (tower["window_size"] // tower["patch_size"]) ** 2
    full = len(tower["fullatt_block_indexes"])
    vision = {"mlp_matrices": 3, "norm": "float32", "window": window, "full_layers": full}
    return _qwen_vl(config, name, vision=vision)


def qwen3_vl(config: dict[str, Any], name: str) -> ModelSizes:
    deepstack = len(config["vision_config"]["deepstack_visual_indexes"])
    vision = {"deepstack": deepstack, "outputs_held": 3}  # the position embeddings are held in float32
    return _qwen_vl(config, name, vision=vision, head_norm=True)


SIZES = {
    "mplugowl3": mplug_owl3,
    "mllama": mllama,
    "idefics": idefics,
    "open_flamingo": open_flamingo,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
}
"""`Family.sizes` of all families of this package."""
