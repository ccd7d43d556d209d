"""Layer: real launch. Commands on ranks that they start themselves, and ranks whose launcher is killed."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launch import HANG, PYTHON, ROOT, Launched

pytestmark = [pytest.mark.launch, pytest.mark.slow]

COMMAND = """
import os, sys, time
from pathlib import Path
from mllm_seqpar.cli.program_exit import run
from mllm_seqpar.errors import ConfigError

def main(argv):
    def work(argv):
        rank = int(os.environ["RANK"])
        if argv[0] == "fail" and rank == 1:
            raise ConfigError("this rank's disk is full")
        time.sleep(%g if argv[0] == "fail" or (argv[0] == "hang" and rank) else rank)
        Path(argv[1], argv[0], str(rank)).write_text(os.environ["WORLD_SIZE"])
        return 3  # also of rank 1, as after a signal at which all ranks stop
    return run(work, argv)
""" % (2 * HANG)


STARTS = """
import os, sys
from mllm_seqpar.cli import launch

folder, patient = sys.argv[1], float(sys.argv[2])
starts = {
    "work": (patient, ["--num_processes", "2", "work", folder]),
    "fail": (patient, ["fail", folder, "--num-processes=2"]),
    "hang": (1, ["hang", folder, "--num_processes=2"]),
}
forked = {}
for name, (launch.LAST_RANK, argv) in starts.items():
    pid = os.fork()
    if pid == 0:
        output = os.open(f"{folder}/output-{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.exit(launch.start_ranks_if_asked("example_command:main", argv))
    forked[name] = pid
for name, pid in forked.items():
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""Forks three processes, so that the modules are imported once; each starts ranks."""


def started(folder: Path) -> dict[str, Launched]:
    """Return the status and the output of each command of `STARTS`."""
    (folder / "example_command.py").write_text(COMMAND)
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    options = {"env": environment, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "cwd": ROOT}
    done = subprocess.run(
        [*PYTHON, "-c", STARTS, str(folder), str(HANG)], text=True, timeout=HANG, check=True, **options
    )
    statuses = dict(line.split() for line in done.stdout.splitlines())
    return {name: Launched(int(code), (folder / f"output-{name}").read_text()) for name, code in statuses.items()}


def test_ranks_end_by_themselves_or_with_one_line_about_the_rank_that_failed(tmp_path: Path) -> None:
    for name in ("work", "fail", "hang"):
        (tmp_path / name).mkdir()
    done = started(tmp_path)
    assert done["work"] == (3, "")  # the status of rank 0, which has waited for rank 1
    assert [(tmp_path / "work" / rank).read_text() for rank in "01"] == ["2", "2"]
    lines = [line for line in done["fail"].output.splitlines() if line]
    assert lines == ["[rank 1] error: this rank's disk is full", "stopped: rank 1 ended with exit status 2"]
    assert done["fail"].returncode == 1
    assert done["hang"].returncode == 1
    lost = "stopped: another rank ended or does not answer (rank 1 still ran 1 s after rank 0 had ended)"
    assert lost in done["hang"].output


def test_ranks_end_when_their_launcher_is_killed() -> None:
    rank = "import time; from mllm_seqpar.cli.program_exit import run; "
    rank += "run(lambda _: (print('runs'), time.sleep(300)), [])"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-uc', {rank!r}])"
    variables = os.environ | {"TORCHELASTIC_RUN_ID": "none"}
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, env=variables)
    assert process.stdout is not None and process.stdout.readline() == b"runs\n"
    (child,) = psutil.Process(process.pid).children()
    try:
        process.kill()
        process.wait()
        assert not psutil.wait_procs([child], timeout=30)[1], "the rank runs on without its launcher"
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
        process.stdout.close()
