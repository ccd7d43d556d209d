"""Models sharded by FSDP2 over gloo ranks, by the functions that `SeqParTrainer` uses."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from mllm_seqpar.integrations.accelerate.fsdp2 import enable_fsdp2_on_cpu, require_sharded, set_fsdp_units


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
