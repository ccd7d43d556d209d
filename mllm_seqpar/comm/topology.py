"""Which ranks of a group share a node."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from .agreement import fingerprint
from .base import Communicator


def gather_nodes(comm: Communicator) -> tuple[int, ...]:
    """Return the node of every rank, numbered in the order of the first rank of each node. Collective.

    Ranks share a node if their host name and the boot id of their kernel are equal, which is how NCCL decides whether
    two ranks can use the links inside a node. As in NCCL, the variable NCCL_HOSTID replaces both where it is set.
    """
    hosts = [row[0] for row in comm.gather_ints([fingerprint(host_identity())])]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)


def host_identity() -> str:
    """Return a text that is equal for all processes of a node, and differs between nodes."""
    if given := os.environ.get("NCCL_HOSTID"):
        return given
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot_id.read_text().strip() if boot_id.exists() else "")
