"""Layer: gloo ranks. accelerate on CPU shards parameters by FSDP2, or fails with an error."""

import warnings

import pytest
import torch
from accelerate import ParallelismConfig
from torch import nn
from torch.nn.utils import clip_grad_norm_

from fsdp2_on_cpu import fsdp2_accelerator, shard
from launch import launch_environment
from mllm_seqpar import patch_model
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate import require_sharded, reshard, sequence_parallel_mesh, set_parallelism_on_cpu
from ranks import ranks
from tiny_models.mplug_owl3 import tiny_frames, tiny_model, tiny_text

CONFIG = "configs/fsdp2_cpu_2.yaml"


def loss_of_tiny_model(model: nn.Module) -> torch.Tensor:
    return model(input_ids=tiny_text(2), pixel_values=tiny_frames(2), labels=tiny_text(2), use_cache=False).loss


def partly_frozen_model() -> nn.Module:
    model = tiny_model().train()
    model.vision_model.requires_grad_(False)
    return model


def sharded_facts(rank: int, world: int) -> dict[str, object]:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    model = partly_frozen_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = shard(fsdp2_accelerator(), model, torch.optim.AdamW(trained, lr=0.1))
    loss_of_tiny_model(model).backward()
    norm = clip_grad_norm_(model.parameters(), 0.5).full_tensor().item()
    with torch.no_grad():
        loss_of_tiny_model(model)
    gathered = sum(not isinstance(p, DTensor) for p in model.parameters())
    reshard(model)
    return {
        "norm": norm,
        "clipped": clip_grad_norm_(model.parameters(), torch.inf).full_tensor().item(),
        "local": sum(p.to_local().numel() for p in model.parameters()),
        "gathered": gathered,
        "unsharded": sum(not isinstance(p, DTensor) for p in model.parameters()),
        "optimizer": {*optimizer.param_groups[0]["params"]} == {p for p in model.parameters() if p.requires_grad},
        "units": {type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)},
    }


def test_parameters_are_sharded_and_gradients_are_whole() -> None:
    facts = ranks(2, launch_environment(CONFIG)).run(sharded_facts)
    model = partly_frozen_model()
    loss_of_tiny_model(model).backward()
    expected = clip_grad_norm_(model.parameters(), 0.5).item()
    for row in facts:
        assert row["norm"] == pytest.approx(expected, rel=1e-5)
        assert row["clipped"] == pytest.approx(min(0.5, expected), rel=1e-4)
        assert row["gathered"] > 0, "a forward pass without backward leaves nothing gathered: reshard has no effect"
        assert row["unsharded"] == 0 and row["optimizer"]
        assert {"FSDPHyperDecoderLayer", "FSDPQwen2DecoderLayer", "FSDPSiglipEncoderLayer"} <= row["units"]
    total = sum(p.numel() for p in model.parameters())
    assert sum(row["local"] for row in facts) == total
    assert max(row["local"] for row in facts) < 0.6 * total


def warnings_of_prepare(rank: int, world: int) -> list[str]:
    accelerator = fsdp2_accelerator()
    set_parallelism_on_cpu(accelerator, ParallelismConfig(cp_size=2, dp_shard_size=1))
    model = patch_model(partly_frozen_model(), group=sequence_parallel_mesh(accelerator))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        shard(accelerator, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    return [str(warning.message) for warning in found]


def test_prepare_does_not_warn_of_a_mesh_that_accelerate_chooses() -> None:
    found = ranks(2, launch_environment(CONFIG)).run(warnings_of_prepare)
    assert not [text for texts in found for text in texts if "flattened" in text]


def test_unsharded_parameters_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"2 parameters are not sharded after prepare, among them weight, bias"):
        require_sharded(nn.Linear(2, 2))
