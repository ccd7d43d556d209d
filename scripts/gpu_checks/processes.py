"""Worker processes of the checks with several ranks: one process for each GPU of this node, with a time limit."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 10.0
"""Time for the other ranks to end after one has failed."""
_LAUNCHER = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "PET_")


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit status (None: stopped after the time limit), when, and what it wrote to stderr."""

    rank: int
    status: int | None
    seconds: float
    errors: str

    @property
    def message(self) -> str:
        """The last line that the rank wrote."""
        return ([line.strip() for line in self.errors.splitlines() if line.strip()] or ["no message"])[-1][:200]

    @property
    def problem(self) -> str | None:
        """What went wrong, or None."""
        if self.status == 0:
            return None
        how = "was stopped" if self.status is None else f"ended with status {self.status}"
        return f"rank {self.rank} {how} after {self.seconds:.0f} s: {self.message}"


def refusal(device: str, gpus: int) -> str | None:
    """Return why this launch cannot check several ranks, or None."""
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world < 2:
        return "--ranks checks 2 or more ranks; start it with torchrun --nproc-per-node N scripts/gpu_check.py --ranks"
    if world != local:
        return (
            f"--ranks checks the {local} ranks of one node, and {world} ranks were started on several nodes; start it "
            "on each node separately, with torchrun --standalone"
        )
    if device == "cuda" and gpus < local:
        return f"{local} ranks were started and this node has {gpus} GPUs; start one rank for each GPU"
    return None


def run_ranks(command: Sequence[str], ranks: int, limit_s: float, grace_s: float = GRACE_S) -> list[Ended]:
    """Run `command` in one process per rank, and return how each ended.

    All processes are killed after `limit_s`, or `grace_s` after one of them has failed.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        files = [Path(folder) / str(rank) for rank in range(ranks)]
        start = time.monotonic()
        processes = [_start(command, rank, ranks, port, file) for rank, file in enumerate(files)]
        ended: dict[int, tuple[int | None, float]] = {}
        deadline = start + limit_s
        try:
            while len(ended) < ranks and time.monotonic() < deadline:
                for rank, process in enumerate(processes):
                    if rank not in ended and process.poll() is not None:
                        ended[rank] = process.returncode, time.monotonic() - start
                        if process.returncode:
                            deadline = min(deadline, time.monotonic() + grace_s)
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        killed = None, time.monotonic() - start
        return [
            Ended(rank, *ended.get(rank, killed), file.read_text(errors="replace")) for rank, file in enumerate(files)
        ]


def _start(command: Sequence[str], rank: int, ranks: int, port: int, errors: Path) -> subprocess.Popen[bytes]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if Path("/sys/class/net/lo").exists():
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with errors.open("wb") as file:
        return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
