"""Layer: gloo ranks. The fine-tuning program with a model directory of each family: one trajectory on any layout.

AdamW's eps is 1e-4 here, for the reason that tests/distributed/training/test_fine_tune.py gives.
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from family_directories import MAKERS
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.training.loop import fine_tune
from mllm_seqpar.training.metrics import read_metrics
from ranks import ranks

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""The variables that `accelerate launch` sets for configs/fsdp2_cpu_2.yaml and that determine the sharding."""
# llama 3.2's rows without visible pictures attend to all tiles, padding included, and so depend on the batch.
MICRO_BATCH = {"mllama": 1}


def train(rank: int, world: int, argv: list[str]) -> None:
    with patch.dict(os.environ, LAUNCHED):
        fine_tune(argv)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_training_is_the_same_on_one_and_two_ranks(folder: Path, tmp_path: Path, name: str) -> None:
    layouts: list[tuple[int, tuple[Any, ...]]] = [(1, ()), (2, ())]
    if name == "mllama":  # two groups of one rank: in some steps one group has no picture, and FSDP must stay in step
        layouts.append((2, ("--sp", 1, "--gradient-checkpointing")))
    rows, models = [], []
    for number, (world, more) in enumerate(layouts):
        output = tmp_path / str(number)
        argv = ["--model", folder / name, "--data", folder / "train.jsonl", "--output", output, "--no-progress"]
        argv += ["--steps", 3, "--global-batch", 4, "--lr", 1e-3, "--eps", 1e-4, "--freeze", "vision"]
        argv += ["--micro-batch", MICRO_BATCH.get(name, 2), "--device", "cpu", *more]
        ranks(world).run(train, [*map(str, argv)])
        rows.append(read_metrics(output / "metrics.jsonl"))
        models.append(load_model(str(output / "model")).state_dict())
    load_processor(str(output / "model"))
    assert len(rows[0]) == 3 and rows[0][0]["frames"] == 10
    for one, *others in zip(*rows, strict=True):
        for two in others:
            for key in ("loss", "grad_norm"):
                assert two[key] == pytest.approx(one[key], rel=1e-4), (key, one, two)
            assert one["targets"] == two["targets"] and one["tokens"] == two["tokens"]
    assert rows[0][2]["loss"] < rows[0][0]["loss"]
    before = load_model(str(folder / name)).state_dict()
    assert before.keys() == models[0].keys() == models[1].keys()
    changed = {key for key, value in models[0].items() if not torch.equal(value, before[key])}
    assert changed and not any("vision" in key for key in changed), changed
    for key, value in models[0].items():
        torch.testing.assert_close(models[1][key], value, rtol=1e-3, atol=1e-4)
