"""Moving tensors between the ranks of one group; see `mllm_seqpar.comm.base` for the design."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mllm_seqpar.errors import ConfigError

from .base import Communicator, Pending, Recv, Send
from .byte_counter import ByteCounter
from .launcher import launched_processes
from .loopback import LoopbackCommunicator, LoopbackWorld, run_loopback
from .process_group import ProcessGroupCommunicator
from .subgroup import Subgroup

NOT_A_MEMBER = "group: this process is not a member of the group given; call it on the group's members only"

Group = dist.ProcessGroup | DeviceMesh | Communicator | Literal["self"] | None


def as_communicator(group: Group = None) -> Communicator:
    """Return the communicator for `group`.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, a Communicator, "self" for a group of this process alone,
            or None for the whole world. Without an initialised process group, None is a group of one.

    Raises:
        ConfigError: for a mesh of several dimensions, an object that is none of these, a process outside the group, or
            None where a launcher started several processes and no process group is initialised yet.
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
            raise ConfigError(NOT_A_MEMBER)
        return ProcessGroupCommunicator(group.get_group())
    if group is None and not (dist.is_available() and dist.is_initialized()):
        _require_no_launcher()
        return LoopbackCommunicator(LoopbackWorld(1), 0)
    if isinstance(group, str) and group == "self":
        return LoopbackCommunicator(LoopbackWorld(1), 0)
    if group is None or isinstance(group, dist.ProcessGroup):
        return ProcessGroupCommunicator(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(NOT_A_MEMBER)
    raise ConfigError(
        'group: expected a ProcessGroup, a one-dimensional DeviceMesh, None or "self", '
        f"got {type(group).__name__} {group!r:.60}"
    )


def _require_no_launcher() -> None:
    """Raise ConfigError where this process is one of several that have yet to form a process group."""
    processes, variable = launched_processes()
    if processes > 1:
        raise ConfigError(
            f"group: {variable}={processes}, so a launcher started {processes} processes, but torch.distributed is not "
            "initialised and each would run alone. Call torch.distributed.init_process_group(...) first, or "
            "accelerate's PartialState() or Accelerator(), which do so. If the processes are independent, pass "
            'group="self", a group of one'
        )


__all__ = [
    "ByteCounter",
    "Communicator",
    "Group",
    "LoopbackCommunicator",
    "LoopbackWorld",
    "Subgroup",
    "Pending",
    "ProcessGroupCommunicator",
    "Recv",
    "Send",
    "as_communicator",
    "launched_processes",
    "run_loopback",
]
