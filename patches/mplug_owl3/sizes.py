"""The sizes of an mPLUG-Owl3 model from its configuration, for the planner."""

from typing import Any

from mllm_seqpar.adapting.sizes import CrossAttentionSizes, ModelSizes, TextSizes, VisionSizes

# The SigLIP tower of the published checkpoints, whose configurations have no `vision_config`.
_SO400M = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "image_size": 384,
    "patch_size": 14,
}


def model_sizes(config: dict[str, Any], name: str) -> ModelSizes:
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
