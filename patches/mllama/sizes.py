"""The sizes of a Llama 3.2 Vision model from its configuration, for the planner."""

from typing import Any

from mllm_seqpar.adapting.sizes import CrossAttentionSizes, ModelSizes, TextSizes, VisionSizes


def model_sizes(config: dict[str, Any], name: str) -> ModelSizes:
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
