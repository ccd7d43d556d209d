"""Moving tensors between the ranks of one group; see `mllm_seqpar.comm.base` for the design."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from .base import Communicator, Pending, Recv, Send
from .counters import ByteCounter
from .loopback import LoopbackCommunicator, LoopbackWorld, run_loopback
from .part import PartOfGroup
from .process_group import ProcessGroupCommunicator

NOT_A_MEMBER = "group: this process is not a member of the group given; call it on the group's members only"

Group = dist.ProcessGroup | DeviceMesh | Communicator | None


def as_communicator(group: Group = None) -> Communicator:
    """The communicator for `group`: a ProcessGroup, a one-dimensional DeviceMesh, a Communicator (returned as it is),
    or None for the whole world; without an initialised default group, None is a group of one.

    Raises:
        ConfigError: for a mesh of several dimensions, an object that is none of these, or a process outside the group.
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
        return LoopbackCommunicator(LoopbackWorld(1), 0)
    if group is None or isinstance(group, dist.ProcessGroup):
        return ProcessGroupCommunicator(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(NOT_A_MEMBER)
    raise ConfigError(
        f"group: expected a ProcessGroup, a one-dimensional DeviceMesh or None, got {type(group).__name__}"
    )


__all__ = [
    "ByteCounter",
    "Communicator",
    "Group",
    "LoopbackCommunicator",
    "LoopbackWorld",
    "PartOfGroup",
    "Pending",
    "ProcessGroupCommunicator",
    "Recv",
    "Send",
    "as_communicator",
    "run_loopback",
]
