"""Layer: real launch. SeqParTrainer under `accelerate launch`, against transformers' Trainer in one process."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launch import ROOT, launch


@pytest.mark.launch
@pytest.mark.slow
def test_accelerate_launch_trains_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "distributed" / "training")
    from test_trainer import assert_same_trajectory, train_in_one_process

    one, two = tmp_path / "one", tmp_path / "two"
    expected = train_in_one_process(one, max_steps=2, per_device_train_batch_size=4)
    two.mkdir()
    done = launch(2, "tests/launch/train_with_seqpar_trainer.py", two, config="configs/fsdp2_cpu_2.yaml")
    assert done.returncode == 0, done.output
    assert_same_trajectory(json.loads((two / "log.json").read_text()), expected)
    weights = [load_file(run / "model" / "model.safetensors").keys() for run in (one, two)]
    assert weights[0] == weights[1]
