"""Layer: real launch. The GPU check on a machine without a GPU: it says so; and its rehearsal runs every part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu_check.py"


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


def test_without_a_gpu_it_says_so_in_one_line_and_succeeds():
    done = run()
    assert done.returncode == 0 and done.stdout == "gpu_check: no CUDA GPU here, nothing was checked\n"


@pytest.mark.launch
def test_the_rehearsal_runs_every_part(tmp_path):
    done = run("--device", "cpu", "--json", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["check"] for row in rows} == {"kernel exact", "kernel speed", "ring exact", "memory", "training"}
    assert sum(row["ok"] is True for row in rows) >= 15 and all(row["ok"] is not False for row in rows)


@pytest.mark.launch
def test_a_part_that_ends_badly_is_a_row_and_hides_no_other(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    monkeypatch.setattr(gpu_check, "KERNELS", {"cpu": ["no_such_kernel"]})
    monkeypatch.setattr(gpu_check, "LIMITS_S", {"kernel": 60.0, "ring": 60.0, "memory": 11.0, "training": 0.0})
    monkeypatch.setattr(gpu_check, "run_child", _first_part_really(gpu_check.run_child))
    rows = gpu_check.run_all("cpu")
    assert [row.check for row in rows] == ["kernel:no_such_kernel", "ring", "memory", "training"]
    assert rows[0].ok is False and "does not exist" in rows[0].found
    assert rows[3].found == "not run: out of time"


def _first_part_really(run_child):
    from gpu_checks.rows import Row

    def stub(part, device, limit_s):
        return run_child(part, device, limit_s) if part.startswith("kernel") else [Row(part, "", "", "", True)]

    return stub
