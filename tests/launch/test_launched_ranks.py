"""Layer: real launches. A killed rank, a killed launcher, and an adapter of an installed package."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launch import launch

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent


KILLED = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
import torch, torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # otherwise the launcher may end rank 0 first
torch.set_num_threads(1)
from mllm_seqpar.patches.mplug_owl3.testing import tiny_frames, tiny_model, tiny_text
from mllm_seqpar import patch_model

dist.init_process_group("gloo")
model = tiny_model("per_head").train()
patch_model(model)
ids = tiny_text(3)
for step in range(1000):
    if step == 3 and dist.get_rank() == 1:
        print("killed at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(ids, tiny_frames(3), labels=ids).loss.backward()
    except Exception as error:
        print(f"rank {{dist.get_rank()}} ended at {{time.time()}}: {{type(error).__name__}}: {{error}}", flush=True)
        raise
"""


@pytest.mark.launch
@pytest.mark.slow
def test_other_ranks_end_with_a_message_when_one_is_killed_in_training(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED.format(paths=[str(TESTS), str(TESTS.parent)]))
    done = launch(2, script)
    assert done.returncode != 0
    assert "killed at" in done.output
    killed = float(done.output.split("killed at ")[1].split()[0])
    assert "rank 0 ended at" in done.output, done.output
    ended = float(done.output.split("rank 0 ended at ")[1].split(":")[0])
    assert ended - killed < 60
    assert "Another rank of the group has most likely ended" in done.output


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


@pytest.mark.launch
@pytest.mark.slow
def test_adapter_of_an_installed_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(TESTS / "example_adapter", source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target", target]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *map(str, options), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = launch(2, HERE / "own_model_ranks.py", env={"PYTHONPATH": f"{target}:{TESTS}"})
    assert run.returncode == 0, run.output
    assert len(re.findall(r"rank \d of 2: .* equal", run.output)) == 6, run.output
