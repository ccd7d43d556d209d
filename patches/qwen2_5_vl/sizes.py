"""The sizes of a Qwen2.5-VL model from its configuration, for the planner."""

from typing import Any

from mllm_seqpar.adapting.sizes import ModelSizes

from .. import qwen_vl_planner


def model_sizes(config: dict[str, Any], name: str) -> ModelSizes:
    """Return the sizes; all layers of the vision tower but `fullatt_block_indexes` attend inside windows."""
    tower = config["vision_config"]
    window = (tower["window_size"] // tower["patch_size"]) ** 2
    full = len(tower["fullatt_block_indexes"])
    vision = {"mlp_matrices": 3, "norm": "float32", "window": window, "full_layers": full}
    return qwen_vl_planner.model_sizes(config, name, vision=vision)
