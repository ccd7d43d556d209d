"""A network on this machine: namespaces for ranks or nodes, each behind a link whose speed can be capped.

    with network(2) as links:           # two namespaces, connected; removed when the block ends
        links.cap(0, mbit=100)          # both directions of the first one's link
        ... on_host(links.names[0], "node0", ["torchrun", ...])     # for Popen; or call join(links.names[0]) inside

    rank's namespace: eth0 --- port0 :switch's namespace: bridge        A link is full duplex: what a rank sends is
                      eth0 --- port1                                    capped at eth0, what it receives at its port.

The bridge and its ports have a namespace of their own, so the root namespace is not changed, and removing the
namespaces removes everything. If the process that made them was killed, the next run removes them. Needs root, `ip`
and `tc`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "seqpar"
"""Namespaces are called <PREFIX>-<process id of the launcher>-<index or "switch">."""
SUBNET = "10.213.0."
BURST = 128 << 10
"""Bytes that may exceed the rate at once. A smaller burst makes a late timer lose bandwidth; with this one, single
messages below its size are hardly slowed down, only their sum is."""
QUEUE_S = 0.2
NEW_NETWORK = 0x40000000
"""The flag CLONE_NEWNET of Linux."""


@dataclass(frozen=True)
class Network:
    """The namespaces of one network, and the namespace of the switch that connects them."""

    names: Sequence[str]
    switch: str

    def cap(self, index: int, mbit: float) -> None:
        """Limit both directions of the link of a namespace to `mbit` Mbit/s."""
        shape = ["tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", f"{BURST}", "latency", f"{QUEUE_S * 1e3:g}ms"]
        for name, device in ((self.names[index], "eth0"), (self.switch, f"port{index}")):
            subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape], check=True)

    def cut(self, index: int) -> None:
        """Disconnect a namespace; its peers get no answer, but no closed connection either."""
        _ip(f"-n {self.switch} link set port{index} down")


def obstacle() -> str | None:
    """Return the reason why this process cannot create network namespaces, or None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root: run as root, or under torchrun (uncapped network)"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"this machine cannot make network namespaces: {made.stderr.strip()}" if made.returncode else None


@contextmanager
def network(size: int) -> Iterator[Network]:
    """Yield a network of `size` connected namespaces, whose links are not capped yet."""
    remove_leftovers()
    names = [f"{PREFIX}-{os.getpid()}-{index}" for index in range(size)]
    switch = f"{PREFIX}-{os.getpid()}-switch"
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for index, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link add eth0 type veth peer name port{index} netns {switch}")
            _ip(f"-n {switch} link set port{index} master bridge up")
            _ip(f"-n {name} addr add {address(index)}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
            # BBR paces small messages such as LV-XAttn's far below the speed of the link. So does a congestion window
            # that is reset after the pauses in which ranks compute.
            for setting in ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0"):
                _ip(f"netns exec {name} sysctl -qw net.ipv4.{setting}")
        yield Network(names, switch)
    finally:
        for name in (*names, switch):
            _remove(name)


def join(name: str) -> None:
    """Move this thread into a namespace; the threads and sockets that it makes later are there too."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot join the network namespace {name}")


def on_host(name: str, host: str, command: Sequence[str]) -> list[str]:
    """Return `command` so that it runs in namespace `name` on a machine whose host name is `host`."""
    inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    return ["ip", "netns", "exec", name, *inside, *command]


def address(index: int) -> str:
    """Return the address of the namespace with this index in its network."""
    return f"{SUBNET}{index + 1}"


def processes_in(name: str) -> list[int]:
    """Return the processes that run in a namespace; none if it does not exist."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    return [*map(int, listed.split())]


def kill_processes(name: str) -> None:
    for process in processes_in(name):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def existing() -> list[str]:
    """Return all namespaces on this machine that this module has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")]


def remove_leftovers() -> None:
    """Remove the namespaces of processes that no longer run, and kill the processes inside them."""
    for name in existing():
        if not Path("/proc", name.split("-")[1]).exists():
            _remove(name)


def _remove(name: str) -> None:
    """Kill the processes in a namespace and remove it; do nothing if it does not exist."""
    kill_processes(name)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(arguments: str) -> None:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ip {arguments} failed: {done.stderr.strip()}")
