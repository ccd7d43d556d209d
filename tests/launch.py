"""Runs a script the way a user does: under a real launcher, in fresh processes, with its output captured.

    from launch import launch

    done = launch(2, "scripts/finetune.py", "--steps", 3, config="configs/fsdp2_cpu_2.yaml")
    assert done.returncode == 0, done.output

Slower than the pool of `ranks.py` by seconds, so it is for what needs the real thing: entry scripts, checked-in
configurations, ranks that are killed.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
HANG = 400.0
"""Seconds after which a launch counts as hanging: long, since nothing waits for it and machines may be busy."""


@dataclass(frozen=True)
class Launched:
    """How a launch ended. `output` is what all ranks wrote, standard output and error together."""

    returncode: int
    output: str
    seconds: float


class LaunchHang(AssertionError):
    """A launch that did not end in time; the message ends with what it had written."""


def launch(
    world: int,
    script: str | Path,
    *arguments: object,
    config: str | Path | None = None,
    timeout: float = HANG,
    env: Mapping[str, str] | None = None,
    cwd: str | Path = ROOT,
) -> Launched:
    """Runs `script` in `world` processes and waits for their end.

    Args:
        world: number of processes.
        script: its path, relative to the repository or absolute.
        arguments: of the script; each becomes a string.
        config: an accelerate configuration: `accelerate launch` then, `torch.distributed.run` without it.
        timeout: seconds after which all processes are killed.
        env: variables on top of this process's own.
        cwd: the folder to run in.

    Raises:
        LaunchHang: the time was up; with the output so far.
    """
    command = [*_launcher(world, config), str(ROOT / script), *map(str, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_tree(process.pid)
        output, _ = process.communicate()
        raise LaunchHang(f"{' '.join(command)}\ndid not end within {timeout:g} s; it wrote:\n{output}") from None
    except BaseException:  # the test session was interrupted
        _kill_tree(process.pid)
        raise
    return Launched(process.returncode, output, time.monotonic() - start)


def _launcher(world: int, config: str | Path | None) -> list[str]:
    if config is None:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    options = [f"--config_file={ROOT / config}", f"--num_processes={world}", "--main_process_port=0"]
    return [sys.executable, "-m", "accelerate.commands.launch", *options]


def _kill_tree(pid: int) -> None:
    """Kills a launcher and its ranks; torch's launcher puts each rank in a session of its own, so no
    one signal reaches all."""
    try:
        launcher = psutil.Process(pid)
        family = [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
