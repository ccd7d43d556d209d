"""A network on one machine: each rank runs in its own network namespace, behind a link whose speed can be capped.

    launch(4, [sys.executable, "script.py"])        # like torchrun, but each rank has its own network
    with network(2) as names: ...                   # for several processes in one namespace, as on a node; see on_host

    rank's namespace: eth0 --- port0 :switch's namespace: bridge        A link is full duplex: what a rank sends is
                      eth0 --- port1                                    capped at eth0, what it receives at its port.

The bridge and its ports have a namespace of their own, so the root namespace is not changed, and removing the
namespaces removes everything. They are removed when the ranks end, for any reason. If the launcher itself was killed,
the next run removes them. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "seqpar"
"""Namespaces are called <PREFIX>-<process id of the launcher>-<rank or "switch">."""
LINK = "SEQPAR_BENCH_LINK"
"""Environment variable of a rank: "<namespace of the switch>/<port of the rank>"."""
SUBNET = "10.213.0."
BURST = 128 << 10
"""Bytes that may exceed the rate at once. A smaller burst makes a late timer lose bandwidth; with this one, single
messages below its size are hardly slowed down, only their sum is."""
QUEUE_S = 0.2
PR_SET_PDEATHSIG = 1


def obstacle() -> str | None:
    """Return the reason why this process cannot create network namespaces, or None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root: run as root, or under torchrun with --no-namespaces (uncapped network)"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"this machine cannot make network namespaces: {made.stderr.strip()}" if made.returncode else None


def launch(ranks: int, command: Sequence[str]) -> int:
    """Run `command` once per rank in its namespace, as torchrun does; return 0 or the first failed rank's status."""
    with _exit_on_signals(), network(ranks) as names:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(names):
                processes.append(_start(rank, ranks, name, command))
            while True:
                states = [process.poll() for process in processes]
                if any(states) or None not in states:
                    return next(filter(None, states), 0)
                time.sleep(0.05)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def network(ranks: int) -> Iterator[list[str]]:
    """Yield the names of `ranks` connected namespaces; links are uncapped until a rank caps its own."""
    remove_leftovers()
    names = [f"{PREFIX}-{os.getpid()}-{rank}" for rank in range(ranks)]
    switch = _switch()
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for rank, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link add eth0 type veth peer name port{rank} netns {switch}")
            _ip(f"-n {switch} link set port{rank} master bridge up")
            _ip(f"-n {name} addr add {address(rank)}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
            # BBR paces small messages such as LV-XAttn's far below the speed of the link. So does a congestion window
            # that is reset after the pauses in which ranks compute.
            for setting in ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0"):
                _ip(f"netns exec {name} sysctl -qw net.ipv4.{setting}")
        yield names
    finally:
        for name in (*names, switch):
            _remove(name)


def on_host(name: str, host: str, command: Sequence[str]) -> list[str]:
    """Return `command` so that it runs in namespace `name` on a machine whose host name is `host`."""
    inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    return ["ip", "netns", "exec", name, *inside, *command]


def address(index: int) -> str:
    """Return the address of the namespace with this index in its network."""
    return f"{SUBNET}{index + 1}"


def cap_link(index: int, mbit: float) -> None:
    """Limit both directions of the link of a namespace of this process's network to `mbit` Mbit/s."""
    cap_device("eth0", mbit, f"{PREFIX}-{os.getpid()}-{index}")
    cap_device(f"port{index}", mbit, _switch())


def cut_link(index: int) -> None:
    """Disconnect a namespace of this process's network; its peers get no answer, but no closed connection either."""
    _ip(f"-n {_switch()} link set port{index} down")


def cap_device(device: str, mbit: float, namespace: str | None = None) -> None:
    """Limit what `device` of a namespace (None: this process's own) sends to `mbit` Mbit/s."""
    inside = [] if namespace is None else ["-n", namespace]
    shape = ["tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", f"{BURST}", "latency", f"{QUEUE_S * 1e3:g}ms"]
    subprocess.run(["tc", *inside, "qdisc", "replace", "dev", device, "root", *shape], check=True)


def processes_in(name: str) -> list[int]:
    """Return the processes that run in a namespace; none if it does not exist."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    return [*map(int, listed.split())]


def kill_processes(name: str) -> None:
    """Kill the processes that run in a namespace."""
    for process in processes_in(name):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def existing() -> list[str]:
    """Return all namespaces on this machine that runs of this module have made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")]


def remove_leftovers() -> None:
    """Remove the namespaces of launchers that no longer run, and kill the processes inside them."""
    for name in existing():
        if not Path("/proc", name.split("-")[1]).exists():
            _remove(name)


def _start(rank: int, ranks: int, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"}
    variables |= {"MASTER_ADDR": address(0), "MASTER_PORT": "29500", LINK: f"{_switch()}/port{rank}"}
    variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # c10d warns that these addresses have no host names
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *command],
        env={"OMP_NUM_THREADS": "1"} | os.environ | variables,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the launcher only, which then ends the ranks
        preexec_fn=_die_with_parent,
    )


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that the namespaces are removed."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _switch() -> str:
    return f"{PREFIX}-{os.getpid()}-switch"


def _remove(name: str) -> None:
    """Kill the processes in a namespace and remove it; do nothing if it does not exist."""
    kill_processes(name)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(arguments: str) -> None:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ip {arguments} failed: {done.stderr.strip()}")
