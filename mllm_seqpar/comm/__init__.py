"""Transfers of tensors between the ranks of one group; `mllm_seqpar.comm.base` describes the design."""

from .base import ByteCounter, Communicator, Pending, Recv, Send, Subgroup
from .group import Group, as_communicator, destroy, launched_processes, transfer_communicator
from .loopback import LoopbackCommunicator, LoopbackWorld, run_loopback
from .process_group import ProcessGroupCommunicator

__all__ = [
    "ByteCounter",
    "Communicator",
    "Group",
    "LoopbackCommunicator",
    "LoopbackWorld",
    "Pending",
    "ProcessGroupCommunicator",
    "Recv",
    "Send",
    "Subgroup",
    "as_communicator",
    "destroy",
    "launched_processes",
    "run_loopback",
    "transfer_communicator",
]
