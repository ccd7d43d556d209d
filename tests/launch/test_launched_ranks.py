"""Layer: real launches. Ranks end when their launcher is killed."""

import contextlib
import os
import subprocess
import sys

import psutil
import pytest


@pytest.mark.launch
@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed() -> None:
    rank = (
        "import time; from mllm_seqpar.cli.program_exit import run; run(lambda _: (print('runs'), time.sleep(300)), [])"
    )
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
