"""Layer: pure Python. The Slurm script, with stand-ins for Slurm's commands, starts one launcher per node."""

import os
import subprocess
from pathlib import Path

import pytest

from launch import ROOT

SCRIPT = ROOT / "scripts" / "slurm" / "launch.sbatch"
COMMANDS = {
    "scontrol": "printf 'alpha\\nbeta\\ngamma\\n'",
    "srun": 'echo "$1"; shift; for node in 0 1 2; do SLURM_NODEID=$node "$@" || exit; done',
    "accelerate": 'for word in "$@"; do printf "[%s]" "$word"; done; echo',
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "any")
    monkeypatch.setenv("SLURM_JOB_ID", "40123")


def submit(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True)


def test_each_node_gets_a_launcher_with_its_rank(slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    done = submit("a.yaml", "scripts/finetune.py", "--output", "a b")
    assert done.returncode == 0, done.stderr
    common = "[--config_file][a.yaml][--num_machines][3][--num_processes][12][--main_process_ip][alpha]"
    common += "[--main_process_port][20123][scripts/finetune.py][--output][a b]"
    expected = ["--kill-on-bad-exit=1", *(f"[launch][--machine_rank][{node}]{common}" for node in range(3))]
    assert done.stdout.splitlines() == expected


def test_missing_arguments_and_missing_gpus_are_errors(slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert "usage: sbatch" in submit("a.yaml").stderr
    assert "submit it with --gpus-per-node" in submit("a.yaml", "scripts/finetune.py").stderr
