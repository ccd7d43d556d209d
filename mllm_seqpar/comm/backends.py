"""What NCCL and gloo need of a process: devices, environment variables, and an orderly exit.

Devices: A process group has one backend for each type of device. NCCL transfers from one GPU of the process: the
`device_id` of `init_process_group`, or the current device. gloo accepts CUDA tensors in some collectives, but its sends
and receives read and write CPU memory only (the table of backends in the documentation of torch.distributed), and every
schedule needs them.

Settings: A patched model has its own NCCL communicator in addition to that of FSDP2 or DDP. NCCL allows this if the
operations of both are executed in the same order on all ranks. The package launches them in the same order;
NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 and later) makes the device execute them in that order. torch's defaults of
TORCH_NCCL_ASYNC_ERROR_HANDLING (3) and TORCH_NCCL_DUMP_ON_TIMEOUT (1) end the process when a rank is lost, and write
what each rank had launched.

Exit: A collective over gloo runs on a thread of its process group. The thread releases the tensors after it has
reported that the work is done. To release a tensor that Python has dropped by then, it needs the interpreter lock.
Before Python 3.14, a thread that waits for the lock while the interpreter shuts down is terminated, which in C++ code
aborts the process: "terminate called without an active exception", SIGABRT, after a successful run.

Destroying the process group joins these threads only if nothing else refers to the group, and a DeviceMesh, FSDP, DDP
and a patched model do. It also blocks while a collective waits for another rank. The exit handler here therefore does
not destroy the group. It waits, with the lock released, until the threads have released their tensors. It involves no
other rank, so it is safe after an error and in any order of the ranks. It ignores threads of other backends: with
"cpu:gloo,cuda:nccl" it waits for the gloo part only. It does not complete a collective that was never waited for.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mllm_seqpar._logging import get_logger
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
        model: the model.
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
        device = _compute_device(parameter)
        if moves_later and device.type in ("cpu", "meta"):
            continue
        if device not in reasons:
            reasons[device] = _reason(group, device)
        if reasons[device]:
            name = next((name for name, x in model.named_parameters() if x is parameter), "weight")
            raise ConfigError(f"parameter {name} of {type(model).__name__} is on {device}{reasons[device]}")


def _compute_device(parameter: Tensor) -> torch.device:
    if isinstance(parameter, DTensor) and not parameter.is_meta:
        return torch.device(parameter.device_mesh.device_type)
    return parameter.device


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


_log = get_logger(__name__)


def setting_problems(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable whose value makes transfers slow or unsafe over NCCL."""
    problems = []
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        problems.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue, where transfers and computation "
            "wait for each other; set it to 32"
        )
    if environment.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") == "0":
        problems.append(
            "NCCL_LAUNCH_ORDER_IMPLICIT is not 1, so NCCL does not order the transfers of this model and the "
            "collectives of FSDP2 or DDP, which can deadlock; set it to 1 (NCCL 2.26 or later)"
        )
    handling = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", environment.get("NCCL_ASYNC_ERROR_HANDLING"))
    if handling == "0":
        problems.append("TORCH_NCCL_ASYNC_ERROR_HANDLING=0 makes all ranks hang if one rank dies; remove it")
    return problems


def order_launches() -> None:
    """Set NCCL_LAUNCH_ORDER_IMPLICIT=1, unless the user has set it, there is a process group, or only one process.

    NCCL reads it when the process creates its first communicator, so every program must call this before.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@functools.cache
def warn_about_settings() -> None:
    """Log `setting_problems` of this process, once."""
    if problems := setting_problems(os.environ):
        _log.warning("%s. Set these variables where you start the processes", "; ".join(problems))


_THREAD_NAME = "pt_gloo_runloop"
_PAUSE = 0.01
_LIMIT = 5.0


@functools.cache
def release_gloo_at_exit() -> None:
    """Register `wait_for_gloo_threads` to run at interpreter exit, once per process.

    Exit handlers run in the reverse order of their registration.
    """
    atexit.register(wait_for_gloo_threads)


def wait_for_gloo_threads(limit: float = _LIMIT) -> None:
    """Wait until no gloo thread of this process needs the interpreter lock, at most `limit` seconds.

    The lock is free during each pause, so a thread that waits for it runs. A thread that sleeps before and after a
    pause and has not run in between has no tensor left to release.
    """
    if sys.version_info >= (3, 14):  # threads that request the lock too late sleep, and nothing aborts
        return
    end = time.monotonic() + limit
    before = _gloo_threads()
    while before and time.monotonic() < end:
        time.sleep(_PAUSE)
        now = _gloo_threads()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return the state and the context switch counts of each gloo thread, by thread id; empty without /proc."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() != _THREAD_NAME:
                continue
            lines = (task / "status").read_text().splitlines()
        except OSError:  # the thread has ended
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        switches = fields.get("voluntary_ctxt_switches", "") + fields.get("nonvoluntary_ctxt_switches", "")
        found[task.name] = (fields["State"].split()[0], switches)
    return found
