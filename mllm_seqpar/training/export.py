"""The trained model as an ordinary directory: safetensors, config, processor."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn


def export_model(model: nn.Module, processor: Any, directory: Path) -> None:
    """Writes what `from_pretrained` of the unpatched, unsharded model reads. Every rank calls it, rank 0 writes.

    The whole model is gathered in rank 0's CPU memory. The directory appears at once, under its final name.

    Args:
        model: prepared, resharded; parameter names are those of the model before patching and sharding.
        processor: saved beside it; None for none.
        directory: replaced when it exists.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        for alias, name in _tied(model).items():
            state[alias] = state[name]  # one tensor again, which save_pretrained then writes once
        draft = directory.with_name(directory.name + ".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        model.save_pretrained(draft, state_dict=state)  # type: ignore[operator]  # a transformers model
        if processor is not None:
            processor.save_pretrained(draft)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(draft, directory)
    if dist.is_initialized():
        dist.barrier()


def _tied(model: nn.Module) -> dict[str, str]:
    """Second and later names of parameters that have several, with their first name."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }
