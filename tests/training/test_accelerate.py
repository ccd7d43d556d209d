"""Layer: gloo ranks. What accelerate makes of a model on CPU: parameters that really are shards, or a loud error."""

import os

import pytest
import torch
from torch import nn

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate import launch as accelerate_glue
from mllm_seqpar.integrations.accelerate.cpu import require_sharded
from mllm_seqpar.patches.mplug_owl3.testing import tiny_frames, tiny_model, tiny_text
from mllm_seqpar.training.step import clip_gradients
from ranks import ranks

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""The variables that `accelerate launch` makes of configs/fsdp2_cpu_*.yaml and that decide the sharding."""


def start(variables: dict[str, str]):
    """An accelerator as a freshly launched process has it."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in LAUNCHED:
        os.environ.pop(name, None)
    os.environ.update(variables)
    return accelerate_glue.start_accelerator("cpu")


def shard(rank: int, world: int) -> dict[str, object]:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    model = tiny_model().train()
    for parameter in model.vision_model.parameters():
        parameter.requires_grad_(False)
    groups = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerate_glue.shard_model(start(LAUNCHED), model, torch.optim.AdamW(groups, lr=0.1))
    model(input_ids=tiny_text(2), pixel_values=tiny_frames(2), labels=tiny_text(2), use_cache=False).loss.backward()
    norm = clip_gradients(model, 0.5)
    with torch.no_grad():
        model(input_ids=tiny_text(1), pixel_values=tiny_frames(1), use_cache=False)
    gathered = sum(not isinstance(p, DTensor) for p in model.parameters())
    accelerate_glue.reshard(model)
    return {
        "norm": norm,
        "clipped": clip_gradients(model, 0.0),
        "held": sum(p.to_local().numel() for p in model.parameters()),
        "gathered after evaluation": gathered,
        "whole": sum(not isinstance(p, DTensor) for p in model.parameters()),
        "trained": {id(p) for group in optimizer.param_groups for p in group["params"]}
        == {id(p) for p in model.parameters() if p.requires_grad},
        "units": sorted({type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)}),
    }


def test_parameters_are_shards_and_gradients_whole() -> None:
    found = ranks(2).run(shard)
    model = tiny_model().train()
    for parameter in model.vision_model.parameters():
        parameter.requires_grad_(False)
    model(input_ids=tiny_text(2), pixel_values=tiny_frames(2), labels=tiny_text(2), use_cache=False).loss.backward()
    expected = clip_gradients(model, 0.5)
    for row in found:
        assert row["norm"] == pytest.approx(expected, rel=1e-5)
        assert row["clipped"] == pytest.approx(min(0.5, expected), rel=1e-4)
        assert row["gathered after evaluation"] > 0, "reshard has nothing to do any more"
        assert (row["whole"], row["trained"]) == (0, True)
        assert {"FSDPHyperDecoderLayer", "FSDPQwen2DecoderLayer", "FSDPSiglipEncoderLayer"} <= set(row["units"])
    total = sum(p.numel() for p in model.parameters())
    assert sum(row["held"] for row in found) == total
    assert max(row["held"] for row in found) < 0.6 * total


def start_without_fsdp2(rank: int, world: int, variables: dict[str, str]) -> None:
    start(variables)


@pytest.mark.parametrize("variables", [{}, {**LAUNCHED, "FSDP_VERSION": "1"}])
def test_several_processes_without_fsdp2_are_refused(variables: dict[str, str]) -> None:
    errors = ranks(2).errors(start_without_fsdp2, variables)
    assert all(isinstance(e, ConfigError) and "fsdp_version: 2" in str(e) for e in errors), errors


def test_whole_parameters_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"2 parameters are not sharded after prepare, among them weight, bias"):
        require_sharded(nn.Linear(2, 2))


def layouts(rank: int, world: int) -> list[tuple]:
    made = [accelerate_glue.make_layout(sp, "cpu") for sp in (None, 1, 2)]
    return [(x.dp, x.sp, x.group_index, x.sum_over_dp([rank, 1.0], torch.device("cpu"))) for x in made]


def test_consecutive_ranks_share_samples() -> None:
    assert ranks(4).run(layouts) == [
        [(1, 4, 0, [rank, 1.0]), (4, 1, rank, [6.0, 4.0]), (2, 2, rank // 2, [2 * (rank % 2) + 2.0, 2.0])]
        for rank in range(4)
    ]


def indivisible(rank: int, world: int) -> None:
    accelerate_glue.make_layout(2, "cpu")


def test_sp_must_divide_the_world() -> None:
    assert all("--sp 2 does not divide the 3 processes" in str(error) for error in ranks(3).errors(indivisible))
