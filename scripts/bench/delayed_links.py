"""Network namespaces whose links have a latency, for kernels without `tc netem`: a process forwards packets late.

    launch(4, [sys.executable, "script.py"], round_trip_ms=1.0)      # like `namespaces.launch`

Each rank's namespace has one TUN device. This process reads the packets of all ranks and writes each one to its
destination after half the round trip. The links have no cap. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from namespaces import PREFIX, remove_leftovers

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
MTU = 65000
"""Large packets, because this process handles each of them."""

_libc = ctypes.CDLL(None, use_errno=True)


def launch(ranks: int, command: Sequence[str], round_trip_ms: float, variables: dict[str, str] | None = None) -> int:
    """Run `command` once per rank behind links of this latency; return 0 or the first failed rank's status."""
    with _devices(ranks) as (names, devices):
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "29500"} | (variables or {})
        common |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(names):
                own = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=own))
            return _forward(devices, processes, round_trip_ms / 2e3)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _forward(devices: list[int], processes: Sequence[subprocess.Popen[bytes]], delay_s: float) -> int:
    """Forward packets until all processes have ended or one has failed."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number, next_check = itertools.count(), 0.0
    while True:
        now = time.perf_counter()
        if now >= next_check:
            states = [process.poll() for process in processes]
            if any(states) or None not in states:
                return next(filter(None, states), 0)
            next_check = now + 0.2
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            os.write(device, packet)
        until = min(waiting[0][0] if waiting else next_check, next_check)
        for source in select.select(devices, [], [], max(0.0, until - time.perf_counter()))[0]:
            packet = os.read(source, MTU + 64)
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of an IPv4 destination
            if 0 <= target < len(devices):
                due = time.perf_counter() + delay_s
                heapq.heappush(waiting, (due, next(number), devices[target], packet))


@contextmanager
def _devices(ranks: int) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the names of `ranks` namespaces, and the file descriptors of their TUN devices `eth0`."""
    remove_leftovers()
    names = [f"{PREFIX}-{os.getpid()}-{rank}" for rank in range(ranks)]
    devices: list[int] = []
    try:
        for rank, name in enumerate(names):
            subprocess.run(["ip", "netns", "add", name], check=True)
            devices.append(_tun_in(name))
            address = f"addr add 10.213.0.{rank + 1}/24 dev eth0"
            for arguments in (address, f"link set eth0 mtu {MTU} up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *arguments.split()], check=True)
        yield names, devices
    finally:
        for device in devices:
            os.close(device)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _tun_in(name: str) -> int:
    """Create the TUN device `eth0` in a namespace, and return its file descriptor."""
    own, other = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        _set_namespace(other)
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
        return device
    finally:
        _set_namespace(own)
        os.close(own)
        os.close(other)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed; network namespaces need root")
