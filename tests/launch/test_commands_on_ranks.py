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
        Path(argv[1], str(rank)).write_text(os.environ["WORLD_SIZE"])
        return 3  # also of rank 1, as after a signal at which all ranks stop
    return run(work, argv)
""" % (2 * HANG)


def run(code: str, *argv: object, **variables: str) -> Launched:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [*PYTHON, "-c", code, *map(str, argv)]
    options = {"env": environment, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, text=True, timeout=HANG, **options)
    return Launched(done.returncode, done.stdout)


def test_ranks_end_by_themselves_or_with_one_line_about_the_rank_that_failed(tmp_path: Path) -> None:
    (tmp_path / "example_command.py").write_text(COMMAND)
    start = "import sys; from mllm_seqpar.cli import launch; launch.LAST_RANK = %g; "
    start += "sys.exit(launch.start_ranks_if_asked('example_command:main', sys.argv[1:]))"
    start, impatient = start % HANG, start % 1
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run(start, "--num_processes", 2, "work", tmp_path, PYTHONPATH=path)
    assert done == (3, "")  # the status of rank 0, which has waited for rank 1
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2", "2"]
    done = run(start, "fail", tmp_path, "--num-processes=2", PYTHONPATH=path)
    lines = [line for line in done.output.splitlines() if line]
    assert lines == ["[rank 1] error: this rank's disk is full", "stopped: rank 1 ended with exit status 2"]
    assert done.returncode == 1
    done = run(impatient, "hang", tmp_path, "--num_processes=2", PYTHONPATH=path)
    assert done.returncode == 1
    assert "stopped: another rank ended or does not answer (rank 1 still ran 1 s after rank 0 had ended)" in done.output


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
