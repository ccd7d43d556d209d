"""Layer: gloo ranks. The fine-tuning program with a model directory of each family: one trajectory on any layout.

AdamW's eps is 1e-4 here, for the reason that tests/distributed/training/test_fine_tune.py gives.
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from family_cases import QWENS
from family_directories import MAKERS
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.training.finetune import fine_tune
from ranks import RankError, ranks
from ranks_worker import reset_global_state
from training_logs import assert_same_trajectory, log_of

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""The variables that `accelerate launch` sets for configs/fsdp2_cpu_2.yaml and that determine the sharding."""
# llama 3.2's rows without visible images attend to all tiles, padding included, and so depend on the batch.
MICRO_BATCH = {"mllama": 1}


def train(rank: int, world: int, argv: list[str]) -> None:
    with patch.dict(os.environ, LAUNCHED):
        fine_tune(argv)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_training_is_the_same_on_one_and_two_ranks(folder: Path, tmp_path: Path, name: str) -> None:
    layouts: list[tuple[int, tuple[Any, ...]]] = [(1, ()), (2, ())]
    if name == "mllama":  # two groups of one rank: in some steps one group has no image, and FSDP must stay in step
        layouts.append((2, ("--sp", 1, "--gradient_checkpointing")))
    rows, models = [], []
    for number, (world, more) in enumerate(layouts):
        output = tmp_path / str(number)
        argv = ["--model", folder / name, "--data", folder / "train.jsonl", "--output_dir", output, "--use_cpu"]
        argv += ["--max_steps", 2, "--global_batch_size", 4, "--learning_rate", 1e-3, "--adam_epsilon", 1e-4]
        argv += ["--per_device_train_batch_size", MICRO_BATCH.get(name, 2), "--freeze", "vision", "--warmup_steps", 0]
        argv += ["--save_strategy", "no", "--disable_tqdm", True, *more]
        ranks(world).run(train, [*map(str, argv)])
        rows.append(log_of(output))
        models.append(load_model(str(output / "model")).state_dict())
    load_processor(str(output / "model"))
    for other in rows[1:]:
        assert_same_trajectory(other, rows[0])
    assert rows[0][1]["loss"] < rows[0][0]["loss"]
    before = load_model(str(folder / name)).state_dict()
    assert before.keys() == models[0].keys() == models[1].keys()
    changed = {key for key, value in models[0].items() if not torch.equal(value, before[key])}
    assert changed and not any("vision" in key for key in changed), changed
    for key, value in models[0].items():
        torch.testing.assert_close(models[1][key], value, rtol=1e-3, atol=1e-4)


def train_with_features(rank: int, world: int, argv: list[str], output: Path) -> None:
    """Train without stored features, then store them in the first of two epochs, then, on two ranks, train on them."""
    with patch.dict(os.environ, LAUNCHED):
        for name in ("plain", "stored", "again")[: 3 if world > 1 else 2]:
            features = [] if name == "plain" else ["--features", str(output / "features")]
            fine_tune([*argv, "--output_dir", str(output / name), *features])
            reset_global_state()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world"), [*((name, 1 + index % 2) for index, name in enumerate(MAKERS)), ("moss_vl", 2)]
)
def test_stored_features_train_bit_for_bit_alike(folder: Path, tmp_path: Path, name: str, world: int) -> None:
    argv = ["--model", folder / name, "--data", folder / "train.jsonl", "--use_cpu", "--max_steps", 4]
    argv += ["--global_batch_size", 2, "--learning_rate", 1e-3, "--freeze", "vision", "--warmup_steps", 0]
    argv += ["--per_device_train_batch_size", MICRO_BATCH.get(name, 2), "--save_strategy", "no", "--disable_tqdm", True]
    if name in QWENS:
        with pytest.raises(RankError, match="cannot be stored: its images have different numbers of patches"):
            ranks(world).run(train_with_features, [*map(str, argv)], tmp_path)
        return
    ranks(world).run(train_with_features, [*map(str, argv)], tmp_path)
    assert [*(tmp_path / "features" / "frames").glob("*/*.safetensors")]
    logs = [log_of(tmp_path / run) for run in ("plain", "stored", "again")[: 3 if world > 1 else 2]]
    assert all(log == logs[0] for log in logs)
