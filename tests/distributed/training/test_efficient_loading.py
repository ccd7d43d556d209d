"""Layer: gloo ranks. With fsdp_cpu_ram_efficient_loading only rank 0 reads the weights, and training is the same.

accelerate's own code runs here: `prepare` moves the model to the meta device, shards it, and broadcasts the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from family_cases import BATCHES
from family_directories import MAKERS
from family_harness import family_module, inputs_of
from fsdp2_on_cpu import fsdp2_accelerator, shard
from launch import launch_environment
from mllm_seqpar import patch_model
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate import allocate, receives_weights, send_buffers, set_fsdp_units
from mllm_seqpar.models.loading import load_model
from mllm_seqpar.training import finetune
from ranks import ranks
from tiny_models.mplug_owl3 import tiny_config, tiny_model
from training_logs import fine_tuning, log_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mplug_owl3, tied embeddings": ("mplug_owl3", {"tie_word_embeddings": True}),
    "idefics, additional tokens and resampler": ("idefics", {"additional_vocab_size": 2, "use_resampler": True}),
    "mllama": ("mllama", {}),
    "moss_vl": ("moss_vl", {}),
}
if "open_flamingo" in MAKERS:
    CASES["open_flamingo over mpt, tied embeddings"] = ("open_flamingo", {"kind": "mpt"})


def environment(efficient: bool) -> dict[str, str]:
    return launch_environment("configs/fsdp2_cpu_2.yaml") | {"FSDP_CPU_RAM_EFFICIENT_LOADING": str(efficient).lower()}


def save(directory: Path, family: str, overrides: dict[str, Any]) -> None:
    if family == "open_flamingo":
        MAKERS[family](directory, **overrides)  # type: ignore[call-arg]
    else:
        family_module(family).tiny_model(**overrides).save_pretrained(directory)


def flamingo_inputs(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, 100, (2, 11), generator=generator)
    ids[:, (1, 6)] = model.media_token_id
    pixels = torch.randn(2, 2, 1, 3, 16, 16, generator=generator)
    return {"vision_x": pixels, "lang_x": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def two_steps(rank: int, world: int, directory: str, family: str) -> dict[str, Any]:
    empty = receives_weights()
    model: Any = (allocate(load_model(directory, device_map="meta")) if empty else load_model(directory)).train()
    inputs = flamingo_inputs(model) if family == "open_flamingo" else inputs_of(family, BATCHES[family], model)
    send_buffers(model)
    patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer = shard(fsdp2_accelerator(), model, optimizer)
    losses = []
    for _ in range(2):
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"empty": empty, "losses": losses, "weights": {name: whole(x) for name, x in model.state_dict().items()}}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_if_only_rank_0_reads_the_weights(tmp_path: Path, name: str) -> None:
    family, overrides = CASES[name]
    save(tmp_path, family, overrides)
    expected, found = (
        ranks(2, environment(efficient)).run(two_steps, str(tmp_path), family) for efficient in (False, True)
    )
    assert [row["empty"] for row in expected + found] == [False, False, False, True]
    for row in found:
        assert row["losses"] == expected[0]["losses"]
        assert row["weights"].keys() == expected[0]["weights"].keys()
        assert all(torch.equal(row["weights"][key], weight) for key, weight in expected[0]["weights"].items())


def fine_tune(rank: int, world: int, argv: list[str]) -> list[Any]:
    with mock.patch("mllm_seqpar.training.model.load_model", wraps=load_model) as loaded:
        finetune.fine_tune(argv)
    return [call.kwargs.get("device_map") for call in loaded.call_args_list]


@pytest.mark.slow
def test_fine_tuning_reads_the_weights_on_rank_0_only(training_files: Path, tmp_path: Path) -> None:
    trajectories = []
    for efficient in (False, True):
        output = tmp_path / str(efficient)
        argv = fine_tuning(training_files, output, "--max_steps", 2, "--per_device_train_batch_size", 2)
        devices = ranks(2, environment(efficient)).run(fine_tune, argv)
        assert devices == [[None], ["meta" if efficient else None]]
        trajectories.append(log_of(output))
    assert trajectories[0] == trajectories[1]


class Saved(nn.Linear):
    """A module with a buffer in its state dict."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2))


class Tied(nn.Sequential):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self[1].weight = self[0].weight


def refused(rank: int, world: int) -> None:
    accelerator = fsdp2_accelerator()
    layer = nn.Linear(2, 2)
    set_fsdp_units(accelerator, nn.ModuleList([layer, layer]))  # a module in two places stays one
    with pytest.raises(ConfigError, match=r"the buffer mean is in the model's state dict.*: false"):
        set_fsdp_units(accelerator, Saved())
    with pytest.raises(ConfigError, match=r"Tied has tied parameters and no method tie_weights.*: false"):
        set_fsdp_units(accelerator, Tied())


@pytest.mark.slow
def test_models_that_accelerate_cannot_send_are_refused() -> None:
    ranks(2, environment(True)).run(refused)


def without_head(rank: int, world: int) -> list[str]:
    """Load as a user's script does, from a checkpoint without a layer that is not used."""
    accelerator = fsdp2_accelerator()
    weights = {name: x for name, x in tiny_model().state_dict().items() if "post_layernorm" not in name}
    model = type(tiny_model()).from_pretrained(None, config=tiny_config(), state_dict=weights)
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    set_fsdp_units(accelerator, model)
    assert not any(x.is_meta for x in [*model.parameters(), *model.buffers()])
    return absent


@pytest.mark.slow
def test_weights_that_a_checkpoint_lacks_are_allocated_on_all_ranks() -> None:
    found = ranks(2, environment(True)).run(without_head)
    assert found == [[], ["vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias"]]


def test_allocated_parameters_stay_tied_and_have_addresses_of_their_own() -> None:
    with torch.device("meta"):
        model = tiny_model(tie_word_embeddings=True)
    before = [(name, p.shape, p.requires_grad) for name, p in model.named_parameters()]
    allocate(model)
    assert [(name, p.shape, p.requires_grad) for name, p in model.named_parameters()] == before
    assert len({p.data_ptr() for p in model.parameters()}) == len(before)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not any(x.is_meta for x in model.buffers())
