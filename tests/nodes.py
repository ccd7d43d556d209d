"""Two nodes on one machine: two network namespaces with host names of their own, connected by links with a capped rate.

Each node runs a launcher, as on a cluster, and the launcher starts the node's ranks. Needs root, `ip`, `tc` and
`unshare`.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import namespaces
from launch import HANG, PYTHON, ROOT, Launched, LaunchHang

RANKS = 2
"""Ranks per node under accelerate."""
MBIT = 200.0
"""Rate of a node's link, in each direction."""
PORT = "29500"


class TwoNodes:
    """Launchers on two nodes; each call is one run on both."""

    def __init__(self, links: namespaces.Network) -> None:
        self.links = links
        self.names = links.names

    def accelerate(self, config: str, script: str | Path, *arguments: object, **options) -> list[Launched]:
        """Run `accelerate launch` with a configuration of two machines on both nodes; see `run`."""
        common = [*PYTHON, "-m", "accelerate.commands.launch", f"--config_file={ROOT / config}"]
        common += ["--num_machines=2", f"--num_processes={2 * RANKS}", "--main_process_ip", namespaces.address(0)]
        common += ["--main_process_port", PORT, "--machine_rank"]
        program = [PYTHON[1], str(ROOT / script), *map(str, arguments)]
        return self.run(lambda node: [*common, str(node), *program], **options)

    def torchrun(self, script: str | Path, *arguments: object, **options) -> list[Launched]:
        """Run `torchrun` on both nodes, with one rank per node; see `run`."""
        common = [*PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        common += ["--master-addr", namespaces.address(0), "--master-port", PORT, "--node-rank"]
        program = [PYTHON[1], str(ROOT / script), *map(str, arguments)]
        return self.run(lambda node: [*common, str(node), *program], **options)

    def run(
        self,
        command: Callable[[int], list[str]],
        timeout: float = HANG,
        during: Callable[[Callable[[Callable[[], Any]], None]], None] = lambda wait_until: None,
    ) -> list[Launched]:
        """Run `command(node)` on each node, call `during(wait_until)`, and wait for their end.

        `wait_until(condition)` returns when `condition()` is true.

        Raises:
            LaunchHang: if a launcher did not end, or a condition was not true, within `timeout` seconds.
            AssertionError: if a launcher ended before a condition was true, or if a process is still running on a node
                10 s after the launchers ended.
        """

        def wait_until(condition: Callable[[], Any]) -> None:
            while not condition():
                ended = [launcher.returncode for launcher in launchers if launcher.poll() is not None]
                assert not ended, f"a launcher ended with status {ended[0]}; the nodes wrote:\n{read(files)}"
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("during", timeout)
                time.sleep(0.1)

        variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # c10d warns that these addresses have no host names
        with tempfile.TemporaryFile("w+") as first, tempfile.TemporaryFile("w+") as second:
            files, launchers = (first, second), []
            deadline = time.monotonic() + timeout
            try:
                for node, (name, file) in enumerate(zip(self.names, files, strict=True)):
                    line = namespaces.on_host(name, f"node{node}", command(node))
                    pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
                    launchers.append(subprocess.Popen(line, cwd=ROOT, env={**os.environ, **variables}, **pipes))
                during(wait_until)
                for launcher in launchers:
                    launcher.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise LaunchHang(f"no end within {timeout:g} s; the nodes wrote:\n{read(files)}") from None
            finally:
                left = self._processes_left(seconds=10.0)
                for name in self.names:
                    namespaces.kill_processes(name)
                for launcher in launchers:
                    launcher.kill()
                    launcher.wait()
            assert not left, f"processes {left} still run after the launchers ended; the nodes wrote:\n{read(files)}"
            return [Launched(*pair) for pair in zip((x.returncode for x in launchers), read(files), strict=True)]

    def _processes_left(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while True:
            left = [pid for name in self.names for pid in namespaces.processes_in(name)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)


def read(files: Sequence) -> list[str]:
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read())
    return texts


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Yield two nodes; skip the test with the reason if this process cannot make network namespaces."""
    reason = namespaces.obstacle()
    if reason:
        pytest.skip(reason)
    with namespaces.network(2) as links:
        for node in range(2):
            links.cap(node, MBIT)
        yield TwoNodes(links)
