"""Processes of ranks with torchrun's environment, whose crash or hang the caller survives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
        if self.status == 0:
            return None
        how = "was stopped" if self.status is None else f"ended with status {self.status}"
        return f"rank {self.rank} {how} after {self.seconds:.0f} s: {self.message}"


def run_ranks(
    commands: Sequence[Sequence[str]], *, limit_s: float, grace_s: float, one_gpu: bool = False
) -> list[Ended]:
    """Run the command of each rank, and return how each ended; the ranks meet at the loopback device.

    All processes are killed after `limit_s`, or `grace_s` after one of them has failed. With `one_gpu`, all ranks use
    the first GPU, and each has variables with which NCCL takes it for a rank on another node.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(len(commands))]
        common = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)} | _loopback()
        start, deadline = time.monotonic(), time.monotonic() + limit_s
        processes: list[subprocess.Popen[bytes]] = []
        ended: dict[int, tuple[int | None, float]] = {}
        try:
            for rank, command in enumerate(commands):
                places = _places(rank, len(commands), one_gpu)
                processes.append(_start(command, common | places, files[rank]))
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
        outputs = [file.read_text(errors="replace") for file in files]
        return [Ended(rank, *ended.get(rank, killed), output) for rank, output in enumerate(outputs)]


def _loopback() -> dict[str, str]:
    """Return the variables with which ranks meet at a free port of the loopback device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    if Path("/sys/class/net/lo").exists() and "GLOO_SOCKET_IFNAME" not in os.environ:
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found


def _places(rank: int, ranks: int, one_gpu: bool) -> dict[str, str]:
    """Return the variables of one rank: torchrun's, and with `one_gpu` those of NCCL.

    NCCL refuses two ranks of one node on one GPU. A different NCCL_HOSTID makes each rank a node, and between nodes
    without InfiniBand it transfers over sockets.
    """
    found: dict[str, int | str] = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    if one_gpu:
        found |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NCCL_HOSTID": f"rank-{rank}"}
        found |= {f"NCCL_{name}_DISABLE": 1 for name in ("P2P", "SHM", "IB")}
        if Path("/sys/class/net/lo").exists():
            found["NCCL_SOCKET_IFNAME"] = "lo"
    return {name: str(value) for name, value in found.items()}


def _start(command: Sequence[str], variables: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    with open(output, "wb") as file:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C reaches the launcher only, which then ends the ranks
        )
