"""Models sharded by FSDP2 over gloo ranks, by the functions that `SeqParTrainer` uses, and their tensors."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mllm_seqpar.integrations.accelerate import enable_fsdp2_on_cpu, require_sharded, set_fsdp_units


def fsdp2_accelerator() -> Accelerator:
    """Return an accelerator under the variables of a configuration with FSDP2, on this rank of a pool."""
    accelerator = Accelerator(cpu=True)
    enable_fsdp2_on_cpu(accelerator)
    return accelerator


def shard(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return the model and torch's own optimizer, sharded over all ranks."""
    set_fsdp_units(accelerator, model)
    model, prepared = accelerator.prepare(model, optimizer)
    require_sharded(model)
    return model, prepared.optimizer


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors, those that FSDP2 shards over all ranks gathered. All ranks must have the same names.

    `full_tensor` of each takes many times as long.
    """
    sharded = {name: x for name, x in tensors.items() if isinstance(x, DTensor)}
    for name, x in sharded.items():
        assert x.placements == (Shard(0),) and x.device_mesh.size() == dist.get_world_size(), name
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, {name: local(x).numpy() for name, x in sharded.items()})
    return tensors | {name: torch.cat([torch.from_numpy(shard[name]) for shard in shards]) for name in sharded}


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that FSDP2 shards, in the same memory; another tensor as it is."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def total_norm(tensors: Iterable[Tensor | None]) -> float:
    """Return the Euclidean norm of all tensors together; those that FSDP2 shards are sharded over all ranks."""
    given = [x for x in tensors if x is not None]
    square = torch.stack([local(x).double().square().sum() for x in given]).sum()
    if any(isinstance(x, DTensor) for x in given):
        dist.all_reduce(square)
    return square.sqrt().item()
