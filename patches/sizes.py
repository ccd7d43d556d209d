"""The sizes of the models of each family from their `config.json`, for the planner; imported without torch.

`SIZES` lists them by the `model_type` of the file.
"""

from dataclasses import replace
from typing import Any

from mllm_seqpar.adapting import (
    CrossAttentionSizes,
    ModelSizes,
    ResamplerSizes,
    TextSizes,
    VisionSizes,
)

# Values that a file leaves out, and the SigLIP tower of checkpoints whose files have no `vision_config`.
_CLIP = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_CLIP |= {"image_size": 224}
_SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
_SO400M |= {"image_size": 384, "patch_size": 14}
_MLLAMA_TEXT = {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8}
_MLLAMA_TEXT |= {"intermediate_size": 14336, "vocab_size": 128256}
_MLLAMA_TOWER = {"hidden_size": 1280, "num_hidden_layers": 32, "attention_heads": 16, "intermediate_size": 5120}
_MLLAMA_TOWER |= {"num_global_layers": 8, "image_size": 448, "patch_size": 14, "vision_output_dim": 7680}
_IDEFICS = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
_IDEFICS |= {"vocab_size": 32000}
_IDEFICS_TOWER = {"num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120}
_IDEFICS_TOWER |= {"image_size": 224, "patch_size": 14}


def _text(config: dict[str, Any], **others: Any) -> TextSizes:
    """Return the sizes of a language model whose configuration has the names of Llama's, except for `others`."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    fields = {
        "hidden": hidden,
        "layers": config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "mlp_inner": config["intermediate_size"],
        "mlp_matrices": 3,
        "vocabulary": config["vocab_size"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
    }
    return TextSizes(**fields | others)


def _heads(text: TextSizes) -> dict[str, Any]:
    """Return the heads of cross-attention that has those of the language model."""
    return {"heads": text.heads, "kv_heads": text.kv_heads, "head_dim": text.head_dim}


def _tower(config: dict[str, Any], **others: Any) -> VisionSizes:
    """Return the sizes of a vision tower whose configuration has the names of CLIP's, except for `others`."""
    names = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names["mlp_inner"] = "intermediate_size"
    return VisionSizes(**{field: config[name] for field, name in names.items() if field not in others}, **others)


def _patches(tower: dict[str, Any]) -> int:
    return int(tower["image_size"] // tower["patch_size"]) ** 2


def mplug_owl3(config: dict[str, Any], name: str) -> ModelSizes:
    fields = config.get("vision_config")
    tower = _SO400M if fields is None else _CLIP | {"patch_size": 16} | fields
    text, patches = _text(config), _patches(tower)
    vision = _tower(tower, tokens=patches, keys=patches)
    return ModelSizes(
        name=name,
        text=text,
        cross=CrossAttentionSizes(
            layers=len(config.get("hyper_layers", (1, 9, 17, 25))),
            **_heads(text),
            visual_dim=text.hidden,
            own_queries=False,
            features_norm=True,
            gate="none" if config.get("gate", "per_head") in (None, "vector") else "per_head",
            earlier_frames=True,
        ),
        vision=vision,
        projector=(vision.width, *(config.get("projector_layers") or 1) * (text.hidden,)),
    )


def _cross_layers(text: TextSizes, layers: int) -> CrossAttentionSizes:
    """Return the sizes of layers of their own that stand among those of the text, with its heads and MLP."""
    return CrossAttentionSizes(
        layers=layers,
        **_heads(text),
        visual_dim=text.hidden,
        mlp_inner=text.mlp_inner,
        mlp_matrices=3,
        key_norm="float32",
        earlier_frames=True,
    )


def mllama(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes; missing values have the defaults of transformers' `MllamaConfig`."""
    language = _MLLAMA_TEXT | (config.get("text_config") or {})
    tower = _MLLAMA_TOWER | (config.get("vision_config") or {})
    patches = _patches(tower) + 1
    tiles = tower.get("max_num_tiles", 4)  # the processor pads every image to this many
    tower_layers = tower["num_hidden_layers"] + tower["num_global_layers"]
    cross_layers = len(language.get("cross_attention_layers") or (3, 8, 13, 18, 23, 28, 33, 38))
    text = _text(language, layers=language["num_hidden_layers"] - cross_layers)
    return ModelSizes(
        name=name,
        text=text,
        cross=_cross_layers(text, cross_layers),
        vision=_tower(
            tower,
            layers=tower_layers,
            heads=tower["attention_heads"],
            tokens=tiles * (patches + -patches % 8),  # the tower pads every tile to a multiple of 8
            keys=tiles * patches,
            tiles=tiles,
            outputs_held=tower_layers,
        ),
        projector=(tower["vision_output_dim"], text.hidden),
    )


def video_mllama(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes: those of Llama 3.2 Vision with frames of one tile, whose patches are pooled to a few tokens."""
    sizes = mllama(config, name)
    tower = _MLLAMA_TOWER | (config.get("vision_config") or {})
    side, mode, stride = int(tower["image_size"] // tower["patch_size"]), config.get("pool_mode", "average"), 4
    if mode is not None:
        stride = config.get("stride") or stride
        side = -(-side // stride) if mode == "bilinear" else side // stride
    patches = _patches(tower) + 1
    return replace(sizes, vision=replace(sizes.vision, tokens=patches + -patches % 8, keys=side**2 + 1, tiles=1))


def _mllama_or_video(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes; published files of MOSS-Video-Preview have the `model_type` of Llama 3.2 Vision."""
    is_video = "VideoMllamaForConditionalGeneration" in (config.get("architectures") or ())
    return (video_mllama if is_video else mllama)(config, name)


def idefics(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes; missing values have the defaults of transformers' `IdeficsConfig`."""
    config = _IDEFICS | config
    tower, perceiver = _IDEFICS_TOWER | (config.get("vision_config") or {}), config.get("perceiver_config") or {}
    width: int = tower.get("embed_dim") or config.get("vision_embed_dim") or 768
    text, patches, resampler = _text(config, norm="mixed"), _patches(tower) + 1, None
    if config.get("use_resampler", False):
        resampler = ResamplerSizes(
            layers=perceiver.get("resampler_depth", 6),
            heads=perceiver.get("resampler_n_heads", 16),
            head_dim=perceiver.get("resampler_head_dim", 96),
            mlp_inner=4 * width,
            code="idefics",
        )
    return ModelSizes(
        name=name,
        text=text,
        cross=CrossAttentionSizes(
            layers=-(-text.layers // config.get("cross_layer_interval", 1)),
            **_heads(text),
            visual_dim=width,
            mlp_inner=text.mlp_inner,
            mlp_matrices=3,
            key_norm="mixed" if config.get("qk_layer_norms") else "none",
        ),
        vision=_tower(
            tower,
            width=width,
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
    language, tower = config["text_config"], _CLIP | {"patch_size": 32} | (config.get("vision_config") or {})
    hidden, model_type = language.get("hidden_size") or language["d_model"], language.get("model_type")
    inner = language.get("intermediate_size") or language.get("ffn_dim")
    llama_names = {
        "hidden_size": hidden,
        "num_hidden_layers": language.get("num_hidden_layers") or language["n_layers"],
        "num_attention_heads": language.get("num_attention_heads") or language["n_heads"],
        "intermediate_size": inner or language.get("expansion_ratio", 4) * hidden,
        "head_dim": None,
    }
    tied = language.get("tie_word_embeddings", model_type in ("mpt", "opt"))
    text = _text(language | llama_names, mlp_matrices=3 if model_type == "llama" else 2, tied_embeddings=tied)
    vision = _tower(tower, tokens=_patches(tower) + 1, keys=64)
    return ModelSizes(
        name=name,
        text=text,
        cross=CrossAttentionSizes(
            layers=text.layers // config.get("cross_attn_every_n_layers", 1),
            heads=8,
            kv_heads=8,
            head_dim=64,
            visual_dim=vision.width,
            mlp_inner=4 * hidden,
            mlp_matrices=2,
        ),
        vision=vision,
        resampler=ResamplerSizes(layers=6, heads=8, head_dim=64, mlp_inner=4 * vision.width),
    )


IMAGE = 360, 640
"""(height, width) of an image, where this determines how many tokens it has, unless the caller says how many."""


def _qwen_vl(config: dict[str, Any], name: str, *, vision: dict[str, Any], head_norm: bool = False) -> ModelSizes:
    """Return the sizes; `vision` has what the configurations of the two vision towers do not have in common.

    Older files have the fields of the language model beside `vision_config` instead of in `text_config`.
    """
    language, tower = config.get("text_config") or config, config["vision_config"]
    tied = language.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    text, merge = _text(language, tied_embeddings=tied, head_norm=head_norm), tower.get("spatial_merge_size", 2)
    inner = tower["hidden_size"] * merge**2
    sizes = ModelSizes(
        name=name,
        text=text,
        vision=_tower(
            tower,
            layers=tower["depth"],
            heads=tower["num_heads"],
            tokens=merge**2,
            keys=1,
            temporal_patch=tower.get("temporal_patch_size", 2),
            patch=tower["patch_size"],
            rotary=True,
            **vision,
        ),
        projector=(inner, inner, text.hidden),
    )
    return sizes.with_frame_tokens(sizes.tokens_of_image(*IMAGE))


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


def moss_vl(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes; the merger joins the patches of a visual token, and states of several blocks of the tower."""
    language, tower = config["text_config"], config["vision_config"]
    merge = tower.get("spatial_merge_size", 2)
    states, cross_layers = 1 + len(tower["deepstack_visual_indexes"]), len(language["cross_attention_layers"])
    text = _text(language, layers=language["num_hidden_layers"] - cross_layers, head_norm=True)
    inner = states * tower["hidden_size"] * merge**2
    sizes = ModelSizes(
        name=name,
        text=text,
        cross=_cross_layers(text, cross_layers),
        vision=_tower(
            tower,
            layers=tower["depth"],
            heads=tower["num_heads"],
            tokens=merge**2,
            keys=2,
            separators=1,
            patch=tower["patch_size"],
            rotary=True,
            outputs_held=2 + states,  # and the position embeddings in float32
        ),
        projector=(inner, inner, text.hidden),
    )
    return sizes.with_frame_tokens(sizes.tokens_of_image(*IMAGE))


SIZES = {
    "mplugowl3": mplug_owl3,
    "mllama": _mllama_or_video,
    "video_mllama": video_mllama,
    "idefics": idefics,
    "open_flamingo": open_flamingo,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "moss_vl": moss_vl,
}
"""`Family.sizes` of all families of this package."""
