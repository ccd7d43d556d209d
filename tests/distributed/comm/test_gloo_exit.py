"""Layer: gloo ranks. A process that used gloo exits with its own status, whatever still refers to the group."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from gloo_exit_ranks import EXPECTED, WORLD

from launch import PYTHON
from mllm_seqpar import patch_model
from mllm_seqpar.comm.gloo_exit import release_gloo_at_exit, wait_for_gloo_threads
from tiny_models.mplug_owl3 import tiny_model

SCRIPT = Path(__file__).with_name("gloo_exit_ranks.py")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts ranks by fork")
def test_processes_exit_with_their_own_status(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*PYTHON, str(SCRIPT), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {case: [status] * WORLD for case, status in EXPECTED.items()}, done.stderr
    assert "ValueError: rank 1 fails" in done.stderr and "onnection" in done.stderr


def test_patching_registers_the_exit_handler_once() -> None:
    for _ in range(2):
        patch_model(tiny_model("per_head"))
    assert release_gloo_at_exit.cache_info().currsize == 1
    wait_for_gloo_threads(limit=60.0)  # returns at once without a process group
