"""The backends of a process group, and from which devices they transfer.

A process group has one backend for each type of device. NCCL transfers from one GPU of the process: the
`device_id` of `init_process_group`, or the current device. gloo accepts CUDA tensors in some collectives, but its sends
and receives read and write CPU memory only (the table of backends in the documentation of torch.distributed), and every
schedule needs them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mllm_seqpar.errors import ConfigError

from .base import Communicator


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, backend in pairs}


_CREATE = 'torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))'


def require_transferable(
    comm: Communicator, model: nn.Module, weights: Iterable[Tensor] | None = None, *, moves_later: bool = False
) -> None:
    """Raise unless the group can transfer from the device that the model computes on. Does not synchronise the device.

    FSDP2 gathers its parameters on the device of their mesh, even with CPU offload.

    Args:
        comm: the group. A group of one and ranks in threads transfer from any device.
        weights: the parameters to check; None for all.
        moves_later: whether the model may still be moved to a GPU, or its weights loaded.

    Raises:
        ConfigError: naming the parameter, its device, and the device and backend of the group.
    """
    if comm.size == 1:
        return
    group = getattr(comm, "group", None)
    reasons: dict[torch.device, str] = {}
    for parameter in model.parameters() if weights is None else weights:
        device = parameter.device
        if isinstance(parameter, DTensor) and not parameter.is_meta:
            device = torch.device(parameter.device_mesh.device_type)
        if moves_later and device.type in ("cpu", "meta"):
            continue
        if device not in reasons:
            reasons[device] = _reason(group, device)
        if reasons[device]:
            name = next((name for name, x in model.named_parameters() if x is parameter), "weight")
            raise ConfigError(f"parameter {name} of {type(model).__name__} is on {device}{reasons[device]}")


def _reason(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the end of a sentence that says why `group` cannot send tensors on `device`, or "" if it can."""
    if device.type == "meta":
        return (
            " and has no values; load the weights before the first forward pass, for example by from_pretrained or "
            "load_state_dict(..., assign=True)"
        )
    if group is None:
        return ""
    backends = backends_of(group)
    backend = backends.get(device.type)
    if device.type == "cuda" and backend == "gloo":
        return (
            ", but the sequence-parallel group transfers over gloo, which sends from CPU memory only. Keep the model "
            f"on the CPU, or create the process group for GPUs: {_CREATE}"
        )
    if backend is None:
        kind, name = next(iter(backends.items()))
        target = _nccl_device(group) if name == "nccl" else torch.device(kind)
        return (
            f", but the sequence-parallel group transfers over {name} on {target}. Call model.to({str(target)!r}) "
            "before the first forward pass"
        )
    if backend == "nccl" and device.index is not None and device != (bound := _nccl_device(group)):
        return (
            f", but the sequence-parallel group of this process transfers over nccl on {bound}. Call "
            f"model.to({str(bound)!r}). If that is another rank's GPU, first choose this rank's: "
            f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then {_CREATE}'
        )
    return ""


def _nccl_device(group: dist.ProcessGroup) -> torch.device:
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
