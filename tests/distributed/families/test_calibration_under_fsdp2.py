"""Layer: gloo ranks. `strategy="auto"` measures in the first forward pass, between the collectives of FSDP2."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mllm_seqpar import patch_model
from mllm_seqpar.planner import calibrate
from ranks import ranks
from tiny_models.mplug_owl3 import Case, inputs_of, shard_units, tiny_model

CASES = [Case(frames=(0,), length=9), Case(frames=(3, 2))]
"""The first batch has no frames, so self-attention asks for rates first, inside a layer that FSDP2 has gathered."""


def train(rank: int, world: int, **options: Any) -> dict[str, Any]:
    """Train a float32 model in bf16 by FSDP2; return the losses, and what was measured before each backward pass."""
    model = patch_model(tiny_model().train(), **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*shard_units(model), model):
        fully_shard(unit, mp_policy=policy)
    measured: list[list[str]] = []
    losses = []
    with mock.patch.object(calibrate, "calibrate", wraps=calibrate.calibrate) as measure:
        for case in (*CASES, *CASES):
            loss = model(**inputs_of(case, model)).loss
            measured.append([str(call.kwargs["shape"]) for call in measure.call_args_list])
            loss.backward()
            losses.append(loss.item())
        measured.append([str(call.kwargs["shape"]) for call in measure.call_args_list])
    return {"losses": losses, "measured": measured}


@pytest.mark.slow
def test_first_pass_measures_what_fsdp2_computes_in_and_no_later_pass_measures() -> None:
    found = ranks(2).run(train, strategy="auto", self_attention="auto")
    expected = ranks(2).run(train)[0]
    for rank in found:
        assert rank["measured"] == [["bfloat16, 4 heads (2 KV heads) of 16"]] * 5
        assert torch.tensor(rank["losses"]).allclose(torch.tensor(expected["losses"]), rtol=0.02)
