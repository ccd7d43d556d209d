"""Layer: gloo ranks. Fine-tuning under the variables of the checked-in configurations has one trajectory on any ranks.

tests/launch/test_scripts.py has the launched script: a rank that fails, and a run resumed bit for bit.

AdamW's eps is 1e-4 here. With 1e-8 its first steps would move a parameter whose true gradient is zero (the bias of keys
without rotary embedding) by the sign of its rounding error, and runs on different numbers of ranks would drift apart.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from launch import ROOT, launch_environment
from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration, MPlugOwl3Processor
from mllm_seqpar.training import loop
from mllm_seqpar.training.metrics import read_metrics
from ranks import ranks
from ranks_worker import reset_global_state

STEPS = 6
VARYING = {"seconds", "peak_memory_mib"}


def fine_tune(rank: int, world: int, argv: list[str], rank_1_argv: Sequence[str] = ()) -> None:
    loop.fine_tune([*argv, *(rank_1_argv if rank == 1 else ())])


def arguments(files: Path, output: Path, *more: object) -> list[str]:
    argv = ["--model", files / "model", "--data", files / "train.jsonl", "--output", output, "--no-progress"]
    argv += ["--eval-data", files / "eval.jsonl", "--eval-every", 3]
    return [*map(str, [*argv, "--steps", STEPS, "--global-batch", 4, "--lr", 1e-3, "--eps", 1e-4, *more])]


def run_on_four_ranks(files: Path, name: str, *more: object) -> Path:
    argv = arguments(files, files / name, *more)
    ranks(4, launch_environment("configs/fsdp2_cpu_4.yaml")).run(fine_tune, argv)
    return files / name


def rows_of(output: Path) -> list[dict[str, Any]]:
    """All rows of the metrics without the values that vary from run to run."""
    return [{k: v for k, v in row.items() if k not in VARYING} for row in read_metrics(output / "metrics.jsonl")]


def assert_same_trajectory(output: Path, reference: Path) -> None:
    for row, expected in zip(rows_of(output), rows_of(reference), strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & expected.keys():
            assert row.pop(name) == pytest.approx(expected.pop(name), rel=1e-4), (name, row, expected)
        assert row == expected


@pytest.fixture(scope="module")
def one_rank(training_files: Path) -> Path:
    """A run of this process alone, stopped after 2 steps and resumed."""
    output = training_files / "one-rank"
    loop.fine_tune(arguments(training_files, output, "--stop-after", 2))
    assert not (output / "model").exists()
    reset_global_state()
    loop.fine_tune(arguments(training_files, output, "--resume", "auto"))
    return output


def test_one_process_learns(one_rank: Path) -> None:
    losses = [row["loss"] for row in rows_of(one_rank) if "loss" in row]
    eval_losses = [row["eval_loss"] for row in rows_of(one_rank) if "eval_loss" in row]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert len(eval_losses) == 2 and eval_losses[1] < eval_losses[0]


@pytest.mark.slow
def test_two_groups_of_two_train_as_one_process(training_files: Path, one_rank: Path) -> None:
    output = run_on_four_ranks(training_files, "two-groups", "--sp", 2)
    assert_same_trajectory(output, one_rank)

    # The trained model has the parameter names of the original one.
    model = MPlugOwl3ForConditionalGeneration.from_pretrained(output / "model")
    MPlugOwl3Processor.from_pretrained(output / "model")
    files = [folder / "model" / "model.safetensors" for folder in (output, training_files)]
    assert load_file(files[0]).keys() == load_file(files[1]).keys()
    expected = MPlugOwl3ForConditionalGeneration.from_pretrained(one_rank / "model").state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_one_group_of_four_trains_as_one_process(training_files: Path, one_rank: Path) -> None:
    options = ("--sp", 4, "--micro-batch", 4, "--gradient-checkpointing")  # the same numbers, computed differently
    assert_same_trajectory(run_on_four_ranks(training_files, "four", *options), one_rank)


@pytest.mark.slow
def test_ranks_with_different_options_are_refused(training_files: Path, tmp_path: Path) -> None:
    argv, rank_1_argv = arguments(training_files, tmp_path), ["--strategy", "ring", "--data", "eval.jsonl"]
    errors = ranks(2, launch_environment("configs/fsdp2_cpu_2.yaml")).errors(fine_tune, argv, rank_1_argv)
    different = "strategy: rank 0: lv-xattn; rank 1: ring"
    paths = f"data: rank 0: {training_files}/train.jsonl; rank 1: eval.jsonl"
    assert [type(error) for error in errors] == [AgreementError] * 2
    assert all(different in str(error) and paths in str(error) for error in errors)


def test_a_missing_model_is_an_error_in_one_line(training_files: Path, tmp_path: Path) -> None:
    argv = arguments(training_files, tmp_path / "out", "--model", tmp_path)
    with pytest.raises(ConfigError, match="no config.json there; give a directory that save_pretrained wrote"):
        loop.fine_tune(argv)


def test_every_checked_in_configuration_is_fsdp2() -> None:
    paths = sorted((ROOT / "configs").glob("fsdp2_*.yaml"))
    assert len(paths) >= 4
    for path in paths:
        config = yaml.safe_load(path.read_text())
        assert config["distributed_type"] == "FSDP", path
        assert config["fsdp_config"]["fsdp_version"] == 2, path
        assert config["use_cpu"] == ("cpu" in path.name), path
        assert config["num_processes"] % config["num_machines"] == 0, path
