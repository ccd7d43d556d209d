"""The sizes of a Qwen3-VL model from its configuration, for the planner."""

from typing import Any

from mllm_seqpar.adapting.sizes import ModelSizes

from .. import qwen_vl_planner


def model_sizes(config: dict[str, Any], name: str) -> ModelSizes:
    deepstack = len(config["vision_config"]["deepstack_visual_indexes"])
    vision = {"deepstack": deepstack, "outputs_held": 3}  # the position embeddings are held in float32
    return qwen_vl_planner.model_sizes(config, name, vision=vision, head_norm=True)
