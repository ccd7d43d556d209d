"""Layer: pure Python. The user's choices: defaults, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mllm_seqpar.config import CHOICES, PLANNED, SeqParConfig
from mllm_seqpar.errors import ConfigError


def test_defaults_are_those_of_the_contract() -> None:
    beyond = {"shard_prompt_from": 16384, "mlp_chunk_size": None, "cluster": None}
    assert dataclasses.asdict(SeqParConfig()) == beyond | {
        "strategy": "lv-xattn",
        "self_attention": "ring",
        "text_layout": "zigzag",
        "tile": None,
        "recompute_visual": True,
        "kernel": "auto",
        "overlap": True,
        "accumulate_dtype": torch.float32,
        "logits": "auto",
    }
    assert SeqParConfig.field_names() == tuple(dataclasses.asdict(SeqParConfig()))


@pytest.mark.parametrize("name,value", [(name, value) for name, allowed in CHOICES.items() for value in allowed])
def test_every_choice_is_accepted(name: str, value: str) -> None:
    assert getattr(SeqParConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name,value", [(name, value) for name, later in PLANNED.items() for value in later])
def test_what_is_not_there_yet_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{name}: '{value}' is not in this version yet; choose one of {CHOICES[name][0]}"
    ):
        SeqParConfig(**{name: value})


@pytest.mark.parametrize(
    "name,value,message",
    [
        *((name, "fancy", f"{name}: 'fancy' is unknown; choose one of {', '.join(CHOICES[name])}") for name in CHOICES),
        ("strategy", None, "strategy: None is unknown"),
        ("accumulate_dtype", torch.bfloat16, "torch.bfloat16 cannot be used; choose torch.float32"),
        ("tile", (2, 2), "tiles belong to the mesh strategy"),
        ("recompute_visual", 1, "recompute_visual: 1 is not a bool"),
        ("overlap", "yes", "overlap: 'yes' is not a bool"),
        ("mlp_chunk_size", 0, "mlp_chunk_size: 0 is not a number of tokens"),
        ("mlp_chunk_size", True, "mlp_chunk_size: True is not a number of tokens"),
        ("cluster", 3, "cluster: 3 is not a path"),
        ("kernel", None, "kernel: None is not a kernel's name"),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_known(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        SeqParConfig(**{name: value})


def test_it_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SeqParConfig().strategy = "ring"  # type: ignore[misc]
    with pytest.raises(TypeError):
        SeqParConfig("ring")  # type: ignore[misc]


@pytest.mark.parametrize("value", ["long", 1.5, True])
def test_a_prompt_is_dealt_from_a_number_of_tokens_on(value: Any) -> None:
    with pytest.raises(ConfigError, match="shard_prompt_from: .* is not a number of tokens; pass an int or None"):
        SeqParConfig(shard_prompt_from=value)
    assert SeqParConfig(shard_prompt_from=None).shard_prompt_from is None
