"""What users run under FSDP2 on the GPUs of this node, against the unpatched model on one.

- accelerate's `prepare` with float32 weights, computation in bf16, and gradient checkpointing, as trainers call it;
- two groups of ranks with a batch each, whose exchanges run beside the collectives of FSDP2 over all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from gpu_checks.model import DTYPE, build, inputs
from gpu_checks.ranks_training import compare, optimizer_of, sharded, train
from gpu_checks.rows import Row
from gpu_checks.training import SIZES
from torch.distributed.device_mesh import init_device_mesh

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator
from mllm_seqpar.integrations.accelerate import enable_fsdp2_on_cpu, require_sharded, set_fsdp_units

LAUNCHED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
"""What `accelerate launch` sets for a configuration with FSDP2."""


def check(comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Yield two steps of each setting against one device."""
    frames, length = SIZES[device.type]
    sizes = (frames, length), (frames - 1, length // 2)
    unpatched = build(device.type)
    batches = [inputs(unpatched, *size) for size in sizes]
    exact = train(unpatched, batches[:1])
    model, optimizer = prepared(build(device.type).float(), device)
    found = train(model, batches[:1], optimizer)
    yield from compare(f"accelerate, bf16, checkpointing, {comm.size} ranks", found, exact, torch.bfloat16)
    subject = f"2 groups of {comm.size // 2} rank(s)"
    if comm.size % 2:
        yield Row("FSDP2 steps", subject, "not run: needs an even number of ranks")
        return
    losses, gradients = train(build(device.type), batches)
    mesh = init_device_mesh(device.type, (2, comm.size // 2), mesh_dim_names=("dp", "sp"))
    number = mesh["dp"].get_local_rank()
    model = sharded(patch_model(build(device.type), group=mesh["sp"]), device)
    exact = [[each[number]] for each in losses], gradients
    yield from compare(subject, train(model, [batches[number]]), exact, DTYPE[device.type])


def prepared(model: Any, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """Patch a model for all ranks, and shard it by accelerate's `prepare`; return it and its optimizer."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    patch_model(model)
    with mock.patch.dict(os.environ, LAUNCHED):
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16")
        enable_fsdp2_on_cpu(accelerator)
        set_fsdp_units(accelerator, model)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
    require_sharded(model)
    return model, optimizer.optimizer
