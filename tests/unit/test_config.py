"""Layer: pure Python. The options of `patch_model`: which values are accepted and rejected."""

import re

import pytest
import torch

from mllm_seqpar.config import CHOICES, SeqParConfig
from mllm_seqpar.errors import ConfigError


def test_every_choice_is_accepted() -> None:
    for name, allowed in CHOICES.items():
        for value in allowed:
            assert getattr(SeqParConfig(**{name: value}), name) == value
    given = {"shard_prompt_from": None, "accumulate_dtype": None, "strategy": "auto", "cluster": "any.yaml"}
    config = SeqParConfig(**given)
    assert {name: getattr(config, name) for name in given} == given
    assert SeqParConfig().accumulate_dtype == "auto" and SeqParConfig().recompute_visual
    assert SeqParConfig(accumulate_dtype=torch.float32).accumulate_dtype is torch.float32


def test_tile_goes_to_mesh_before_ulysses() -> None:
    tile = (2, 2)
    assert SeqParConfig(strategy="mesh", tile=tile).tile_for("mesh") == tile
    assert SeqParConfig(strategy="mesh", tile=[2, 2]).tile == tile  # type: ignore[arg-type]
    assert SeqParConfig(strategy="mesh", tile=tile).tile_for("ring") is None
    both = SeqParConfig(strategy="ulysses", self_attention="mesh", tile=tile)
    assert (both.tile_for("mesh"), both.tile_for("ulysses")) == (tile, None)
    assert SeqParConfig(self_attention="ulysses", tile=tile).tile_for("ulysses") == tile


def test_tile_must_fit_the_number_of_ranks() -> None:
    for options, size, message in (
        ({"strategy": "mesh", "tile": (2, 3)}, 8, "(2, 3) is for 6 ranks, but the group has 8; choose (8, 1)"),
        ({"self_attention": "mesh", "tile": (2, 2)}, 2, "(2, 2) is for 4 ranks, but the group has 2"),
        ({"strategy": "ulysses", "tile": (3, 1)}, 4, "(3, 1) with ulysses needs a multiple of 3 ranks"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"tile: {message}")):
            SeqParConfig(**options).check_ranks(size)


@pytest.mark.parametrize(
    "name,value,message",
    [
        *((name, "fancy", f"{name}: 'fancy' is unknown; choose one of {', '.join(CHOICES[name])}") for name in CHOICES),
        ("strategy", None, "strategy: None is unknown"),
        ("accumulate_dtype", torch.bfloat16, 'torch.bfloat16 cannot be used; choose "auto", torch.float32'),
        ("tile", (2, 2), "tile: (2, 2) was given, but neither strategy='lv-xattn' nor self_attention='ring' takes one"),
        ("tile", (2, 0), "tile: (2, 0) is invalid"),
        ("tile", (2, True), "tile: (2, True) is invalid"),
        ("tile", 4, "tile: 4 is invalid; expected (a, b) with two positive integers, or None"),
        ("recompute_visual", 1, "recompute_visual: 1 is not a bool"),
        ("overlap", "yes", "overlap: 'yes' is not a bool"),
        ("vision_chunk_size", 0, "vision_chunk_size: 0 is not a number of frames"),
        ("mlp_chunk_size", True, "mlp_chunk_size: True is not a number of tokens"),
        ("shard_prompt_from", 1.5, "shard_prompt_from: 1.5 is not a number of tokens; pass a positive int, or None"),
        ("cluster", 3, "cluster: 3 is not a string"),
        ("kernel", None, "kernel: None is not a kernel's name"),
    ],
)
def test_invalid_values_are_rejected_with_the_allowed_ones(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SeqParConfig(**{name: value})


def test_cluster_without_effect_is_rejected() -> None:
    with pytest.raises(ConfigError, match="cluster: .* neither strategy='lv-xattn' nor self_attention='ring' uses it"):
        SeqParConfig(cluster="any.yaml", kernel="torch_cpu")
    assert SeqParConfig(cluster="any.yaml").kernel == "auto"


def test_options_without_effect_are_rejected() -> None:
    for name, options in (
        ("shard_prompt_from", {"self_attention": "star", "shard_prompt_from": None}),
        ("shard_prompt_from", {"self_attention": "local", "shard_prompt_from": 2}),
        ("logits", {"self_attention": "local", "logits": "local"}),
    ):
        with pytest.raises(ConfigError, match=f"{name}.*(never be used|no effect)"):
            SeqParConfig(**options)
