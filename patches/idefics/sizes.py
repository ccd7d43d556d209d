"""The sizes of an IDEFICS model from its configuration, for the planner."""

from typing import Any

from mllm_seqpar.adapting.sizes import CrossAttentionSizes, ModelSizes, ResamplerSizes, TextSizes, VisionSizes


def model_sizes(config: dict[str, Any], name: str) -> ModelSizes:
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
