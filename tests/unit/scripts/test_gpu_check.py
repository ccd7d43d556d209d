"""Layer: one process, and one real launch. The GPU check on a machine without a GPU, and its rehearsal on the CPU."""

import sys

import pytest
import torch


def test_missing_gpu_is_said_and_is_no_failure(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert script("gpu_check").main() == 0
    assert capsys.readouterr().out == "gpu_check: no CUDA GPU here, nothing was checked\n"


@pytest.mark.slow
def test_rehearsal_passes_every_check(script) -> None:
    gpu_check = script("gpu_check")
    parts = ("kernels:torch_cpu", "ring", "memory", "training")
    rows = [row for part in parts for row in gpu_check.run_part(part, "cpu")]
    assert {row.check for row in rows} == {"kernel exact", "kernel speed", "ring exact", "memory", "training"}
    assert sum(row.ok is True for row in rows) >= 15 and all(row.ok is not False for row in rows)


@pytest.mark.launch
@pytest.mark.slow
def test_failed_part_is_a_row_and_the_others_run(script, monkeypatch) -> None:
    gpu_check, rows = script("gpu_check"), script("gpu_checks.rows")
    run_child = gpu_check.run_child

    def kernels_only(part: str, *args: object) -> list:
        return run_child(part, *args) if "kernels" in part else [rows.Row(part, "", "", "", True)]

    monkeypatch.setattr(gpu_check, "KERNELS", {"cpu": ["no_such_kernel"]})
    monkeypatch.setattr(gpu_check, "LIMITS_S", {"kernels": 60.0, "ring": 60.0, "memory": 11.0, "training": 0.0})
    monkeypatch.setattr(gpu_check, "run_child", kernels_only)
    found = gpu_check.run_all("cpu")
    assert [row.check for row in found] == ["kernels:no_such_kernel", "ring", "memory", "training"]
    assert found[0].ok is False and "does not exist" in found[0].found
    assert found[3].found == "not run: out of time"
