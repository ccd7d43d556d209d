"""Layer: gloo ranks. Fine-tuning has one trajectory on any ranks, and continues bit for bit where it stopped.

tests/launch/test_scripts.py has the launched program with a rank that fails alone.

AdamW's eps is 1e-4 here. With 1e-8 its first steps would move a parameter whose true gradient is zero (the bias of keys
without rotary embedding) by the sign of its rounding error, and runs on different numbers of ranks would drift apart.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file

from launch import ROOT, launch_environment
from mllm_seqpar.errors import ConfigError, DataError, SeqParError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration, MPlugOwl3Processor
from mllm_seqpar.training import finetune_trainer
from mllm_seqpar.training.checkpoint_clock import CheckpointClock
from mllm_seqpar.training.finetune import fine_tune
from mllm_seqpar.training.resume import last_checkpoint
from ranks import ranks
from ranks_worker import reset_global_state
from training_logs import assert_same_trajectory, log_of

STEPS = 20
STOP = 8  # in the middle of the second epoch of five steps


def arguments(files: Path, output: Path, *more: object) -> list[str]:
    argv = ["--model", files / "model", "--data", files / "train.jsonl", "--output_dir", output, "--disable_tqdm", True]
    argv += ["--learning_rate", 1e-3, "--adam_epsilon", 1e-4, "--global_batch_size", 4, "--save_steps", 1000, *more]
    return [*map(str, argv)]


def compared(files: Path, output: Path, *more: object) -> list[str]:
    """The arguments of the runs that are compared."""
    evaluation = ["--eval_data", files / "eval.jsonl", "--eval_strategy", "steps", "--eval_steps", 10]
    return arguments(files, output, "--max_steps", STEPS, *evaluation, *more)


@pytest.fixture(scope="module")
def one_process(training_files: Path) -> Path:
    output = training_files / "one-process"
    assert fine_tune(compared(training_files, output)) == 0
    reset_global_state()
    return output


def whole_stopped_and_resumed(rank: int, world: int, files: Path) -> list[int]:
    """Run without interruption; then again, until rank 3 receives SIGTERM in step 8; then continue to step 12."""
    options = ("--sp", 2, "--per_device_train_batch_size", 2)  # one forward pass per step, not four
    statuses = [fine_tune(compared(files, files / "whole", *options))]
    reset_global_state()
    on_step_end = CheckpointClock.on_step_end

    def terminated(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if rank == 3 and state.global_step == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        on_step_end(self, args, state, control, **kwargs)

    with mock.patch.object(CheckpointClock, "on_step_end", terminated):
        statuses.append(fine_tune(compared(files, files / "parts", *options)))
    assert not (files / "parts" / "model").exists()
    reset_global_state()
    resumed = compared(files, files / "parts", *options, "--resume_from_checkpoint", "auto", "--stop_after", 12)
    return [*statuses, fine_tune(resumed)]


@pytest.mark.slow
def test_two_groups_of_two_train_as_one_process_and_resume_bit_for_bit(training_files: Path, one_process: Path) -> None:
    statuses = ranks(4, launch_environment("configs/fsdp2_cpu_4.yaml")).run(whole_stopped_and_resumed, training_files)
    assert statuses == [[0, 128 + signal.SIGTERM, 0]] * 4
    whole, parts, expected = (log_of(training_files / name) for name in ("whole", "parts", "one-process"))
    assert_same_trajectory(whole, expected)
    assert [row["step"] for row in expected if "loss" in row] == [*range(1, STEPS + 1)]
    assert expected[-1]["eval_loss"] < expected[10]["eval_loss"]
    assert parts == [row for row in whole if row["step"] <= 12] and parts[-1]["step"] == 12
    assert (training_files / "parts" / f"checkpoint-{STOP}").is_dir()

    # The trained model has the parameter names of the original one, in its dtype.
    directories = [training_files / name / "model" for name in ("whole", "one-process")]
    MPlugOwl3Processor.from_pretrained(directories[0])
    first, reference = (load_file(directory / "model.safetensors") for directory in directories)
    assert first.keys() == load_file(training_files / "model" / "model.safetensors").keys()
    trained = MPlugOwl3ForConditionalGeneration.from_pretrained(directories[0])
    assert trained.config.use_cache == MPlugOwl3ForConditionalGeneration.config_class().use_cache
    for name, weight in first.items():
        torch.testing.assert_close(weight, reference[name], rtol=1e-3, atol=3e-4)


def refused_and_stopped(rank: int, world: int, files: Path, bad: str) -> list[str]:
    """Return the errors of a run with different options, of one with broken media, and of one that skips them."""
    errors = []
    argv = arguments(files, files / "bad", "--max_steps", 4, "--data", bad)
    for more in ([["--strategy", "ring"], []][rank], [], ["--output_dir", files / "skip", "--on_bad_media", "skip"]):
        try:
            with mock.patch.dict(os.environ, FSDP_OFFLOAD_PARAMS=str(rank) if more[:1] == ["--strategy"] else "false"):
                fine_tune([*argv, *map(str, more)])
            errors.append("")
        except SeqParError as error:
            errors.append(f"{type(error).__name__}: {error}")
        reset_global_state()
    return errors


def with_copies(rank: int, world: int, files: Path) -> None:
    fine_tune(compared(files, files / "copies", "--sp", 2, "--stop_after", 3))


@pytest.mark.slow
def test_two_copies_of_the_parameters_train_as_one_process(training_files: Path, one_process: Path) -> None:
    """HSDP: the launch configuration shards the parameters over the two ranks that share a sample."""
    ranks(4, launch_environment("configs/fsdp2_hsdp_cpu_2x2.yaml")).run(with_copies, training_files)
    assert_same_trajectory(log_of(training_files / "copies"), log_of(one_process)[:3])


def with_checkpointing(rank: int, world: int, files: Path) -> None:
    fine_tune(compared(files, files / "ddp", "--sp", 1, "--stop_after", 3, "--gradient_checkpointing"))


@pytest.mark.slow
def test_ddp_with_gradient_checkpointing_trains_as_one_process(training_files: Path, one_process: Path) -> None:
    """The vision tower has parameters without a gradient, and Trainer does not look for them with checkpointing."""
    ranks(2).run(with_checkpointing, training_files)
    assert_same_trajectory(log_of(training_files / "ddp"), log_of(one_process)[:3])


@pytest.mark.slow
def test_errors_that_all_ranks_see_stop_them_together_after_a_checkpoint(training_files: Path) -> None:
    rows = (training_files / "train.jsonl").read_text().splitlines()
    record = json.loads(next(row for row in rows if '"video"' in row))
    record["messages"][0]["content"][0]["path"] = "broken.mp4"
    (training_files / "broken.mp4").write_bytes(b"no video")
    bad = training_files / "bad.jsonl"
    bad.write_text("\n".join([*[row for row in rows if '"video"' in row][:11], json.dumps(record)]))
    environment = launch_environment("configs/fsdp2_cpu_2.yaml")
    found = ranks(2, environment).run(refused_and_stopped, training_files, str(bad))
    for different, broken, skipped in found:
        assert "AgreementError: arguments: " in different and "strategy: rank 0: ring; rank 1: lv-xattn" in different
        assert "FSDP_OFFLOAD_PARAMS: rank 0: 0; rank 1: false" in different
        assert f"{bad}:12: " in broken and skipped == ""
    complete = last_checkpoint(training_files / "bad")
    assert complete is not None and not (training_files / "bad" / "model").exists()


def test_gradients_that_are_not_finite_stop_a_run(training_files: Path, tmp_path: Path) -> None:
    infinite = mock.patch.object(finetune_trainer.SeqParTrainer, "_get_grad_norm", lambda *_: torch.tensor(torch.nan))
    with infinite, pytest.raises(DataError, match="step 1: the gradient norm is nan, so the parameters were not"):
        fine_tune(arguments(training_files, tmp_path, "--max_steps", 2))


@pytest.mark.slow
def test_adapters_outside_frozen_parts_are_trained_and_saved(training_files: Path, tmp_path: Path) -> None:
    options = ["--use_peft", "--lora_r", 4, "--freeze", "vision", "--max_steps", 2, "--save_strategy", "no"]
    fine_tune(arguments(training_files, tmp_path, *options))
    saved = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert saved and all("lora" in name and "vision_model" not in name for name in saved)
    assert any(weight.any() for name, weight in saved.items() if "lora_B" in name)
    assert json.loads((tmp_path / "model" / "adapter_config.json").read_text())["r"] == 4
    MPlugOwl3Processor.from_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"--lora_target_modules nothing: Target modules .*nothing"):
        fine_tune(arguments(training_files, tmp_path / "2", "--use_peft", "--lora_target_modules", "nothing"))


@pytest.mark.slow
def test_a_checkpoint_is_continued_with_the_same_data_only(training_files: Path, tmp_path: Path) -> None:
    argv = arguments(training_files, tmp_path / "out", "--max_steps", 3, "--global_batch_size", 2)
    fine_tune([*argv, "--stop_after", "1"])
    for more, message in (
        ([], "has checkpoints of another run: use --resume_from_checkpoint auto"),
        (["--resume_from_checkpoint", str(tmp_path)], "is not a complete checkpoint of this program"),
        (
            ["--resume_from_checkpoint", "auto", "--seed", "1"],
            "on other data, in another order, or with another --seed",
        ),
        (["--resume_from_checkpoint", "auto", "--global_batch_size", "4"], "step has 2 samples"),
    ):
        reset_global_state()
        with pytest.raises(ConfigError, match=message):
            fine_tune([*argv, *more])


def test_a_missing_model_is_an_error_in_one_line(training_files: Path, tmp_path: Path) -> None:
    argv = arguments(training_files, tmp_path / "out", "--model", tmp_path)
    with pytest.raises(ConfigError, match="no config.json there; give a directory that save_pretrained wrote"):
        fine_tune(argv)


def test_every_checked_in_configuration_is_fsdp2() -> None:
    paths = sorted((ROOT / "configs").glob("fsdp2_*.yaml"))
    assert len(paths) >= 4
    for path in paths:
        config = yaml.safe_load(path.read_text())
        assert config["distributed_type"] == "FSDP", path
        assert config["fsdp_config"]["fsdp_version"] == 2, path
        assert config["use_cpu"] == ("cpu" in path.name), path
        assert config["num_processes"] % config["num_machines"] == 0, path
