"""Layer: gloo ranks. Frames of later passes over a cache, of models that FSDP2 shards: k passes equal one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from appended_frames import TALKS, passes
from family_harness import family_module
from mllm_seqpar import patch_model
from outcomes import error
from ranks import ranks

TOLERANCE = 1e-5
"""The norms of MOSS-VL compute in float32."""


def sharded_passes(rank: int, world: int, name: str) -> Tensor:
    """Return the logits of all passes; every unit is gathered in each, also on a rank without new frames."""
    talk = TALKS[name]
    model = patch_model(talk.new_model(), shard_prompt_from=4)
    for unit in [*family_module(talk.family).shard_units(model), model]:
        fully_shard(unit)
    return passes(talk, model)[0]


@pytest.mark.parametrize("name", ["gated", "mllama", "idefics", "moss_vl, other numbers", "one frame each"])
def test_passes_that_bring_frames_equal_one_pass_under_fsdp2(name: str) -> None:
    talk = TALKS[name]
    with torch.no_grad():
        expected = talk.new_model()(**talk.inputs()).logits
    for logits in ranks(3).run(sharded_passes, name):
        assert error(logits, expected) < TOLERANCE
