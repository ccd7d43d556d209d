"""Layer: gloo ranks. A rank of a patched model ends with its own status, whatever gloo's threads still hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from launch import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="starts ranks by fork")


def ended(what: str, pairs: int) -> tuple[list[list[int]], str]:
    """The exit statuses of each pair of ranks, and what all wrote to stderr."""
    command = [sys.executable, "tests/running/ending_ranks.py", what, str(pairs)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), done.stderr


def test_ranks_that_never_destroy_their_group_end_with_status_0() -> None:
    statuses, errors = ended("ends", 5)
    assert statuses == [[0, 0]] * 5, errors[-4000:]


def test_a_rank_that_raises_ends_the_other() -> None:
    statuses, errors = ended("raises", 1)
    assert statuses == [[1, 1]], errors[-4000:]
    assert "ValueError: rank 1 cannot go on" in errors and "onnection" in errors, errors[-4000:]
