"""The sizes of Qwen2.5-VL and Qwen3-VL models from their configurations, for the planner."""

from typing import Any

from mllm_seqpar.adapting.sizes import ModelSizes, TextSizes, VisionSizes

HEIGHT, WIDTH = 360, 640
"""The size of an image unless the caller says how many tokens it has."""


def model_sizes(config: dict[str, Any], name: str, *, vision: dict[str, Any], head_norm: bool = False) -> ModelSizes:
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
    return sizes.with_frame_tokens(sizes.tokens_of_image(HEIGHT, WIDTH))
