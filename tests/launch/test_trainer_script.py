"""Layer: real launch. SeqParTrainer under `accelerate launch`, against transformers' Trainer in one process."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launch import ROOT, launch

pytestmark = [pytest.mark.launch, pytest.mark.slow]


def test_accelerate_launch_trains_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "distributed" / "training")
    from train_tiny import log_of, train

    given = {"max_steps": 2, "per_device_train_batch_size": 4}
    train(tmp_path / "one", "plain", given)
    arguments = (tmp_path / "two", "seqpar", json.dumps(given))
    done = launch(2, "tests/distributed/training/train_tiny.py", *arguments, config="configs/fsdp2_cpu_2.yaml")
    assert done.returncode == 0, done.output
    for row, expected in zip(log_of(tmp_path / "two"), log_of(tmp_path / "one"), strict=True):
        for name in {"loss", "grad_norm"} & expected.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-4), (name, row, expected)
    weights = [load_file(tmp_path / run / "model" / "model.safetensors").keys() for run in ("one", "two")]
    assert weights[0] == weights[1]
