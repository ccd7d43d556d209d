"""The model for inference on several ranks: replicated, or with sharded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.comm import Communicator, ProcessGroupCommunicator
from mllm_seqpar.models.loading import layer_classes, load_model


def load_for_inference(path: str, dtype: str, device: torch.device, *, on_cpu: bool = False) -> nn.Module:
    """Load the model in directory `path` in eval mode, on this rank's `device`, or on the CPU for `shard_weights`.

    Args:
        path: a directory that `save_pretrained` wrote, or a published checkpoint.
        dtype: one of `DTYPES` of `cli.launch`; auto is that of the checkpoint.
        device, on_cpu: where the model is.

    Raises:
        ConfigError: if there is no model, or it cannot be read.
    """
    kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    model = load_model(path, dtype=kind).eval().requires_grad_(False)
    return model if on_cpu else model.to(device)


def shard_weights(
    model: nn.Module, comm: Communicator, device: torch.device, encode: Callable[..., Tensor] | None = None
) -> nn.Module:
    """Shard the parameters over a group by FSDP2, in place; a layer is gathered for its forward, then freed.

    This is for models that do not fit on one device. Every generated token gathers every layer once; the embeddings and
    the output head stay gathered after the first token. The answers do not change.

    Args:
        model: on the CPU; its parameters move to `device` layer by layer.
        comm: the group; with one rank the model only moves.
        device: this rank's device.
        encode: becomes the model's `encode_frames` if it has none.
    """
    if comm.size == 1:
        return model.to(device)
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    if isinstance(comm, ProcessGroupCommunicator) and comm.size < dist.get_world_size():
        mesh = DeviceMesh.from_group(comm.group, device.type)
    else:
        mesh = init_device_mesh(device.type, (comm.size,))
    units = set(layer_classes(model))
    for module in reversed(list(model.modules())):  # inner modules first
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    if not hasattr(model, "encode_frames"):
        model.encode_frames = encode  # type: ignore[assignment]
    # encode_frames reads the root's parameters outside of the root's forward
    register_fsdp_forward_method(model, "encode_frames")
    return model
