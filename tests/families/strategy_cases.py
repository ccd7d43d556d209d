"""The ways to distribute a model's attention, as options of `patch_model`, and each family's batch to try them on."""

from __future__ import annotations

from typing import Any

import open_flamingo_cases
import tiny_idefics
import tiny_mllama

from mllm_seqpar import config

WAYS: dict[str, dict[str, Any]] = {
    "mesh 2x2": {"strategy": "mesh", "self_attention": "mesh", "tile": (2, 2), "text_layout": "striped"},
    "mesh, any tile": {"strategy": "mesh", "self_attention": "mesh"},
    "mesh for frames alone": {"strategy": "mesh", "tile": (2, 2)},
    "ulysses": {"strategy": "ulysses", "self_attention": "ulysses"},
    "ulysses for frames alone": {"strategy": "ulysses", "recompute_visual": False},
    "ulysses for text alone": {"self_attention": "ulysses"},
    "hybrid": {"strategy": "ulysses", "self_attention": "ulysses", "tile": (1, 2)},
    "hybrid with LV-XAttn, local text": {"strategy": "ulysses", "tile": (2, 1), "self_attention": "local"},
    "replicate": {"strategy": "replicate"},
    "replicate, nothing recomputed": {"strategy": "replicate", "recompute_visual": False, "self_attention": "local"},
    "auto": {"strategy": "auto"},
}
"""For 4 ranks."""
assert {way.get("strategy", "lv-xattn") for way in WAYS.values()} == set(config.CHOICES["strategy"]) - {"ring"}

IDEFICS = {name: tiny_idefics.Case(images=(4, 1), mask="holes").with_options(**way) for name, way in WAYS.items()}
MLLAMA = {name: tiny_mllama.Case(images=((2, 3, 1), (1,))).with_options(**way) for name, way in WAYS.items()}
GENERATED = {  # prompts that are read with their text dealt to the ranks; decoding is the same for all
    name: (tiny_idefics.LATENTS.with_options(shard_prompt_from=2, **way), {"max_new_tokens": 4})
    for name, way in WAYS.items()
    if way.get("self_attention") != "local"
}
FLAMINGO = {
    name: open_flamingo_cases.Case(media=((1, 4, 7), (3,)), images=2).with_options(**way) for name, way in WAYS.items()
}
THREE_HEADS = {
    name: open_flamingo_cases.Case(media=((1, 4, 7), (3,)), images=2, padding="left").with_options(**way)
    for name, way in {
        "text by heads": {"self_attention": "ulysses", "strategy": "replicate"},
        "mesh": {"self_attention": "mesh", "strategy": "mesh"},
    }.items()
}
