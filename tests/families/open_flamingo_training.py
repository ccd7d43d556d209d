"""What `training.py` needs of OpenFlamingo: over MPT, whose blocks are run in a loop of our own."""

from typing import Any

import open_flamingo_cases
from tiny_open_flamingo import tiny_flamingo

lora_targets = ["to_q", "to_kv", "Wqkv"]


def fresh_model() -> Any:
    return tiny_flamingo("mpt").train()


def shard_units(model: Any) -> list[Any]:
    """Each in one place of the module tree: the layers proper hold these, and are not units themselves."""
    language_model = model.lang_encoder
    return [
        *language_model.gated_cross_attn_layers,
        *language_model.old_decoder_blocks,
        model.perceiver,
        model.vision_encoder,
    ]


def inputs_of(case: Any, model: Any) -> dict[str, Any]:
    return open_flamingo_cases.inputs_of(case)
