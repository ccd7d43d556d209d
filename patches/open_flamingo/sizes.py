"""The sizes of an OpenFlamingo model from its configuration, for the planner."""

from typing import Any

from mllm_seqpar.adapting.sizes import CrossAttentionSizes, ModelSizes, ResamplerSizes, TextSizes, VisionSizes


def model_sizes(config: dict[str, Any], name: str) -> ModelSizes:
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
