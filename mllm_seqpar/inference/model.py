"""The model on several ranks: whole on each of them, or its weights sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.comm import Communicator
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.models.loading import layer_classes, load_model, weight_files
from mllm_seqpar.patching import patch_model

from .encoding import encoder_of

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_for_inference(path: str, dtype: str, device: torch.device, *, on_cpu: bool = False) -> nn.Module:
    """The model in directory `path`, in eval mode, on `device` (or on the CPU, for `shard_weights` to move).

    Args:
        path: a directory that `save_pretrained` wrote, or a published checkpoint.
        dtype: one of `DTYPES`; auto is the checkpoint's.
        device: this rank's.
        on_cpu: leave it there.

    Raises:
        ConfigError: there is no model, or it cannot be read.
    """
    kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    model = load_model(path, dtype=kind).eval().requires_grad_(False)
    return model if on_cpu else model.to(device)


def model_files(path: str) -> str:
    """A digest of a model directory's config and of the names and sizes of its weights: cheap, no tensor is read."""
    folder = Path(path)
    weights = sorted((file.name, file.stat().st_size) for file in weight_files(folder))
    return hashlib.sha256((folder / "config.json").read_bytes() + repr(weights).encode()).hexdigest()[:16]


def distribute(
    model: nn.Module, processor: Any, comm: Communicator, device: torch.device, config: SeqParConfig, *, shard: bool
) -> nn.Module:
    """Patches a loaded model for the ranks of `comm`; with `shard`, its weights are sharded over them too."""
    if shard:
        model = shard_weights(model, comm, device, encode=encoder_of(model, chat_family(processor)))
    return patch_model(model, group=comm, config=config)


def shard_weights(
    model: nn.Module, comm: Communicator, device: torch.device, encode: Callable[..., Tensor] | None = None
) -> nn.Module:
    """Shards the parameters over all ranks by FSDP2, in place: each layer is gathered when it runs, and freed after.

    For models that fill a device by themselves. It costs one gather of every layer per generated token; embeddings and
    vocabulary stay gathered after the first. The answers do not change.

    Args:
        model: on the CPU; its parameters move to `device`, layer by layer.
        comm: the group of all ranks; with one rank the model only moves.
        device: this rank's.
        encode: becomes the model's `encode_frames` when it has none.
    """
    if comm.size == 1:
        return model.to(device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (comm.size,))
    units = set(layer_classes(model))
    for module in reversed(list(model.modules())):  # inner ones first
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    if not hasattr(model, "encode_frames"):
        model.encode_frames = encode  # type: ignore[assignment]
    register_fsdp_forward_method(model, "encode_frames")  # reads the root's parameters, and runs outside of its forward
    return model
