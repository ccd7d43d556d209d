"""Processes of ranks with torchrun's environment, on this machine's network or each behind a link of its own.

    run_ranks([[sys.executable, "script.py"]] * 4)  # all meet at the loopback device
    launch(4, [sys.executable, "script.py"])        # each rank has its own network namespace, whose link can be capped
    with network(2) as names: ...                   # for several processes in one namespace, as on a node; see on_host

    rank's namespace: eth0 --- port0 :switch's namespace: bridge        A link is full duplex: what a rank sends is
                      eth0 --- port1                                    capped at eth0, what it receives at its port.

The bridge and its ports have a namespace of their own, so the root namespace is not changed, and removing the
namespaces removes everything. They are removed when the ranks end, for any reason. If the launcher itself was killed,
the next run removes them. Needs root, `ip`, `tc` and `setpriv`.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
_LAUNCHER = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "PET_")


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit status (None: stopped after the time limit), when, and its captured output."""

    rank: int
    status: int | None
    seconds: float
    output: str

    @property
    def message(self) -> str:
        """The last line that the rank wrote."""
        return ([line.strip() for line in self.output.splitlines() if line.strip()] or ["no message"])[-1][:200]

    @property
    def problem(self) -> str | None:
        """What went wrong, or None."""
        if self.status == 0:
            return None
        how = "was stopped" if self.status is None else f"ended with status {self.status}"
        return f"rank {self.rank} {how} after {self.seconds:.0f} s: {self.message}"


def run_ranks(
    commands: Sequence[Sequence[str]],
    variables: Mapping[str, str] | None = None,
    *,
    limit_s: float = math.inf,
    grace_s: float = 0.0,
    captured: bool = True,
) -> list[Ended]:
    """Run the command of each rank, and return how each ended.

    Args:
        commands: one for each rank.
        variables: of the environment, in addition to those of torchrun's ranks; by default ranks meet at the loopback
            device.
        limit_s: all processes are killed after this time,
        grace_s: or this time after one of them has failed.
        captured: whether the output is captured; otherwise it is that of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(len(commands))]
        common = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
        common |= _loopback() | (variables or {})
        start, deadline = time.monotonic(), time.monotonic() + limit_s
        processes: list[subprocess.Popen[bytes]] = []
        ended: dict[int, tuple[int | None, float]] = {}
        try:
            for rank, command in enumerate(commands):
                processes.append(_start(command, rank, len(commands), common, files[rank] if captured else None))
            while len(ended) < len(processes) and time.monotonic() < deadline:
                for rank, process in enumerate(processes):
                    if rank not in ended and process.poll() is not None:
                        ended[rank] = process.returncode, time.monotonic() - start
                        if process.returncode:
                            deadline = min(deadline, time.monotonic() + grace_s)
                time.sleep(0.05)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        killed = None, time.monotonic() - start
        outputs = [file.read_text(errors="replace") if captured else "" for file in files]
        return [Ended(rank, *ended.get(rank, killed), output) for rank, output in enumerate(outputs)]


def _loopback() -> dict[str, str]:
    """Return the variables with which ranks meet at a free port of the loopback device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    if Path("/sys/class/net/lo").exists() and "GLOO_SOCKET_IFNAME" not in os.environ:
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found


def _start(
    command: Sequence[str], rank: int, ranks: int, variables: Mapping[str, str], output: Path | None
) -> subprocess.Popen[bytes]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    with open(os.devnull if output is None else output, "wb") as file:
        return subprocess.Popen(
            command,
            env={**variables, **{name: str(value) for name, value in places.items()}},
            stdin=subprocess.DEVNULL,
            stdout=None if output is None else file,
            stderr=None if output is None else file,
            start_new_session=True,  # Ctrl-C reaches the launcher only, which then ends the ranks
        )


def obstacle() -> str | None:
    """Return the reason why this process cannot create network namespaces, or None if it can."""
    missing = [tool for tool in ("ip", "tc", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root: run as root, or under torchrun with --no-namespaces (uncapped network)"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"this machine cannot make network namespaces: {made.stderr.strip()}" if made.returncode else None


def launch(ranks: int, command: Sequence[str]) -> int:
    """Run `command` once per rank in its namespace, as torchrun does; return 0 or the first failed rank's status."""
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "GLOO_SOCKET_IFNAME": "eth0"}
    variables |= {"MASTER_ADDR": address(0), "MASTER_PORT": "29500"}
    variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # c10d warns that these addresses have no host names
    with _exit_on_signals(), network(ranks) as names:
        # A rank ends with this process, even if that is killed.
        inside = ["setpriv", "--pdeathsig", "KILL", *command]
        commands = [
            ["ip", "netns", "exec", name, "env", f"{LINK}={_switch()}/port{rank}", *inside]
            for rank, name in enumerate(names)
        ]
        ended = run_ranks(commands, variables, captured=False)
    return next((rank.status for rank in ended if rank.status), 0)


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
