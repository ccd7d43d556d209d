"""Training a patched tiny model of any family: FSDP2, two data parallel groups, LoRA, against the unpatched model.

A family's module has `fresh_model()` (a new model in training mode), `shard_units(model)` (the layers that FSDP2 shards
as units of their own), `inputs_of(case, model)` and `lora_targets` (names of projections). `options` are those of
`patch_model`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from harness import PATIENCE, TOLERANCE
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mllm_seqpar import patch_model
from outcomes import average, worst_gradient
from ranks import ranks

RATE = {"lr": 1e-2, "eps": 1e-3}
"""Epsilon far above rounding, of which Adam would else make whole steps where a gradient is zero."""


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _train(model: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """AdamW steps: losses and the last step's gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **RATE)
    losses = []
    for inputs in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.item())
        grads = {name: _whole(weight.grad) for name, weight in model.named_parameters()}
        optimizer.step()
    return {"losses": losses, "grads": grads}


def _checkpointed(model: Any, checkpointing: bool) -> Any:
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _fsdp_rank(
    rank: int, world: int, family: str, cases: list[list[Any]], checkpointing: bool, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Each of len(cases) data parallel groups has its own cases, one a step, under one FSDP."""
    module = importlib.import_module(family)
    groups = len(cases)
    mesh = init_device_mesh("cpu", (groups, world // groups), mesh_dim_names=("dp", "sp"))
    model = _checkpointed(module.fresh_model(), checkpointing)
    whole = mesh["dp", "sp"]._flatten("all")
    for unit in module.shard_units(model):
        fully_shard(unit, mesh=whole)
    fully_shard(model, mesh=whole)
    patch_model(model, group=mesh["sp"], **options)
    own = cases[mesh["dp"].get_local_rank()]
    found = _train(model, [module.inputs_of(case, model) for case in own])
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    return found if rank == 0 else {"losses": found["losses"]}


def check_fsdp(
    family: str,
    cases: list[list[Any]],
    world: int,
    checkpointing: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Losses of each group's steps, and the last gradients, against the unpatched model that gets all batches."""
    module = importlib.import_module(family)
    outcomes = ranks(world).run(_fsdp_rank, family, cases, checkpointing, dict(options), timeout=PATIENCE)
    model = module.fresh_model()
    optimizer = torch.optim.AdamW(model.parameters(), **RATE)
    for step, batch in enumerate(zip(*cases, strict=True)):
        optimizer.zero_grad(set_to_none=True)
        losses = [model(**module.inputs_of(case, model)).loss for case in batch]
        (sum(losses) / len(losses)).backward()
        for rank, outcome in enumerate(outcomes):
            group = rank // (world // len(cases))
            assert outcome["losses"][step] == pytest.approx(losses[group].item(), rel=TOLERANCE), (rank, step)
        grads = {name: weight.grad for name, weight in model.named_parameters()}
        optimizer.step()
    value, name = worst_gradient(outcomes[0]["grads"], grads)
    assert value < 10 * TOLERANCE, (value, name)  # after updates of weights that differ in their last bits


def _lora(module: Any, checkpointing: bool) -> Any:
    """The Flamingo recipe and LoRA: what is pretrained is frozen; adapters on cross- and self-attention train."""
    torch.manual_seed(3)
    model = get_peft_model(
        _checkpointed(module.fresh_model(), checkpointing),
        LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=module.lora_targets, init_lora_weights=False),
    )
    return model.train()


def _lora_rank(rank: int, world: int, family: str, case: Any, checkpointing: bool, options: Mapping[str, Any]) -> Any:
    module = importlib.import_module(family)
    model = _lora(module, checkpointing)
    patch_model(model, **options)
    found = _train(model, [module.inputs_of(case, model)])
    average(found["grads"], world)
    return found


def check_lora(
    family: str,
    case: Any,
    world: int,
    checkpointing: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Loss and the adapters' gradients; frozen weights have none."""
    module = importlib.import_module(family)
    outcomes = ranks(world).run(_lora_rank, family, case, checkpointing, dict(options), timeout=PATIENCE)
    model = _lora(module, False)
    expected = _train(model, [module.inputs_of(case, model)])
    trained = {name for name, grad in expected["grads"].items() if grad is not None and grad.any()}
    assert trained and all("lora_" in name for name in trained)
    assert outcomes[0]["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    value, name = worst_gradient(outcomes[0]["grads"], expected["grads"])
    assert value < TOLERANCE, (value, name)
