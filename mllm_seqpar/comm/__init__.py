"""Transfers of tensors between the ranks of one group; `mllm_seqpar.comm.base` describes the design."""

from .base import Communicator, Pending, Recv, Send, Subgroup, TransferCounter
from .group import Group, as_communicator, destroy, launched_processes, transfer_communicator
from .loopback import LoopbackCommunicator, LoopbackWorld, run_loopback
from .process_group import ProcessGroupCommunicator

__all__ = [
    "TransferCounter",
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
