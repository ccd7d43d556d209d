"""Launch a script as a user does: under a real launcher, in new processes, with its output captured.

Each process imports torch and transformers, which takes seconds. Only tests of entry scripts and of killed ranks
need that. Others use the worker processes of `ranks.py`, to which `launch_environment` gives the variables of a
checked-in configuration.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable, str(ROOT / "tests" / "rare_collections.py")]
"""Runs a module, code or a script, as `python` does, in two thirds of the time."""
HANG = 400.0
"""Seconds after which a launch counts as hanging; long, because the machine may be busy."""


class Launched(NamedTuple):
    returncode: int
    output: str
    """Standard output and error of all ranks."""


class LaunchHang(AssertionError):
    """A launch that did not end in time; the message includes its output so far."""


def launch(
    world: int,
    script: str | Path,
    *arguments: object,
    config: str | Path | None = None,
    timeout: float = HANG,
    env: Mapping[str, str] | None = None,
) -> Launched:
    """Run `script`, a path from the repository's root, in `world` processes and wait for their end.

    With `config`, a file for accelerate, it runs under `accelerate launch`, otherwise under `torch.distributed.run`.

    Raises:
        LaunchHang: if the processes did not end within `timeout` seconds; they are killed.
    """
    command = [*_launcher(world, config), PYTHON[1], str(ROOT / script), *map(str, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=variables, text=True, errors="replace", **pipes)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_tree(process.pid)
        output, _ = process.communicate()
        raise LaunchHang(f"{' '.join(command)}\ndid not end within {timeout:g} s; it wrote:\n{output}") from None
    except BaseException:  # for example an interrupt of the test session
        _kill_tree(process.pid)
        raise
    return Launched(process.returncode, output)


def _launcher(world: int, config: str | Path | None) -> list[str]:
    if config is None:
        return [*PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    options = [f"--config_file={ROOT / config}", f"--num_processes={world}", "--main_process_port=0"]
    return [*PYTHON, "-m", "accelerate.commands.launch", *options]


def _kill_tree(pid: int) -> None:
    """Kill a launcher and its ranks; they are in several sessions, so no single signal reaches all of them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def launch_environment(config: str) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets in its processes for a configuration file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import prepare_multi_gpu_env

    args, *_ = _validate_launch_command(launch_command_parser().parse_args([f"--config_file={ROOT / config}", "-"]))
    return {name: value for name, value in prepare_multi_gpu_env(args).items() if os.environ.get(name) != value}
