"""Layer: gloo ranks. A script that used gloo ends with its own status, whatever still refers to the group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mllm_seqpar import patch_model
from mllm_seqpar.comm.gloo_shutdown import release_gloo_at_exit, wait_for_gloo_threads
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model

SCRIPT = Path(__file__).with_name("ending_cases.py")


def test_scripts_end_with_their_own_status(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = {case: [0, 0] for case in found} | {"failing": [3, 3]}
    assert found == expected and len(found) == 5, done.stderr


def test_waiting_ends_where_no_group_was_made() -> None:
    wait_for_gloo_threads(limit=60.0)


def test_patching_registers_the_wait_once() -> None:
    for _ in range(2):
        patch_model(tiny_model("per_head"))
    assert release_gloo_at_exit.cache_info().currsize == 1
