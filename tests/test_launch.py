"""Layer: real launch. The launcher of the tests itself: output, exit status, a rank that is killed, a hang."""

import sys
from pathlib import Path

import pytest

from launch import LaunchHang, launch

pytestmark = pytest.mark.launch

SCRIPT = """
import os, signal, sys, time

if sys.argv[1] == "hang":
    print("about to hang")
    time.sleep(600)

import torch.distributed as dist

dist.init_process_group("gloo")
rank, what = dist.get_rank(), sys.argv[1]
if what == "meet":
    dist.barrier()
    print(f"met {rank} of {dist.get_world_size()}")
elif what == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(600)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_output_of_all_ranks_and_exit_status(script: Path) -> None:
    done = launch(2, script, "meet")
    assert done.returncode == 0, done.output
    assert "met 0 of 2" in done.output and "met 1 of 2" in done.output


def test_a_killed_rank_ends_the_launch(script: Path) -> None:
    done = launch(2, script, "kill")
    assert done.returncode != 0
    assert "SIGKILL" in done.output


def test_a_hang_shows_what_was_written(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch._launcher", lambda *_: [sys.executable])  # torch's takes long on a busy machine
    with pytest.raises(LaunchHang, match=r"did not end within 8 s; it wrote:\n(.*\n)*about to hang"):
        launch(1, script, "hang", timeout=8)
