"""Conversion of the argument `group` to a communicator, and the number of processes that a launcher started."""

from __future__ import annotations

import os
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mllm_seqpar.errors import ConfigError

from .base import Communicator
from .loopback import LoopbackCommunicator, LoopbackWorld
from .process_group import ProcessGroupCommunicator
from .transfer_group import destroy_transfer_group, transfer_group

_NOT_A_MEMBER = "group: this process is not a member of the group given; call it on the group's members only"

Group = dist.ProcessGroup | DeviceMesh | Communicator | Literal["self"] | None


def as_communicator(group: Group = None) -> Communicator:
    """Return the communicator for `group`.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, a Communicator, "self" for a group of only this process,
            or None for the whole world. Without an initialised process group, None is a group of one.

    Raises:
        ConfigError: a mesh of several dimensions, an object of another type, a process outside the group, or None if a
            launcher started several processes and no process group is initialised yet.
    """
    if isinstance(group, Communicator):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(
                f"group: a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names} was given; pass the one "
                'dimension that the sequence is split over, for example mesh["sp"]'
            )
        if group.get_coordinate() is None:
            raise ConfigError(_NOT_A_MEMBER)
        return ProcessGroupCommunicator(group.get_group())
    if group is None and not (dist.is_available() and dist.is_initialized()):
        processes, variable = launched_processes()
        if processes > 1:
            raise ConfigError(
                f"group: {variable}={processes}, so a launcher started {processes} processes, but torch.distributed is "
                "not initialised and each would run alone. Call torch.distributed.init_process_group(...) first, or "
                "accelerate's PartialState() or Accelerator(), which do so. If the processes are independent, pass "
                'group="self", a group of one'
            )
        return LoopbackCommunicator(LoopbackWorld(1), 0)
    if isinstance(group, str) and group == "self":
        return LoopbackCommunicator(LoopbackWorld(1), 0)
    if group is None or isinstance(group, dist.ProcessGroup):
        return ProcessGroupCommunicator(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(_NOT_A_MEMBER)
    raise ConfigError(
        'group: expected a ProcessGroup, a one-dimensional DeviceMesh, None or "self", '
        f"got {type(group).__name__} {group!r:.60}"
    )


def transfer_communicator(group: Group = None) -> Communicator:
    """Return a communicator for `group` whose transfers run on a process group of their own; see `transfer_group`.

    The first call for a group is collective. A `Communicator` is returned itself.

    Raises:
        ConfigError: as for `as_communicator`.
        TransferError: another rank of the group does not make the same call, or the ranks cannot connect.
    """
    comm = as_communicator(group)
    if comm is group or not isinstance(comm, ProcessGroupCommunicator):
        return comm
    return ProcessGroupCommunicator(comm.group, transfer_group(comm.group))


def destroy(group: Group = None) -> None:
    """Close the process group that patched models and attention functions use for transfers among `group`.

    Every rank of the group calls this function, after `unpatch_model`. It is needed only to free the group's memory and
    threads while the program continues: `torch.distributed.destroy_process_group()` closes it too. The next call of
    `patch_model` makes a new one.

    Raises:
        ConfigError: as for `as_communicator`.
    """
    comm = as_communicator(group)
    if isinstance(comm, ProcessGroupCommunicator):
        comm.kept.buffers.clear()
        destroy_transfer_group(comm.group)


_SIZE_AND_RANK = (
    ("WORLD_SIZE", "RANK"),  # torchrun, accelerate, DeepSpeed; first, because they may run inside one of the others
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),  # MVAPICH2
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    # srun. SLURM_NTASKS does not count: sbatch and salloc set it for a script that runs once.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def launched_processes() -> tuple[int, str]:
    """Return the number of processes that the innermost launcher started, and the variable that says so.

    Without a launcher the number is 1 and the name is empty.
    """
    for size, rank in _SIZE_AND_RANK:
        if rank in os.environ and os.environ.get(size, "").isdigit():
            return int(os.environ[size]), size
    return 1, ""
