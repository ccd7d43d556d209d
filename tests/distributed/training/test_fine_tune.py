"""Layer: gloo ranks. Fine-tuning has one trajectory on any ranks, and continues bit for bit where it stopped.

tests/launch/test_scripts.py has the launched program with a rank that fails alone.

AdamW's eps is 1e-4 here. With 1e-8 its first steps would move a parameter whose true gradient is zero (the bias of keys
without rotary embedding) by the sign of its rounding error, and runs on different numbers of ranks would drift apart.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from launch import ROOT, launch_environment
from mllm_seqpar.errors import ConfigError, DataError, NonFiniteLogitsError, SeqParError
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration, MPlugOwl3Processor
from mllm_seqpar.training import finetune_trainer
from mllm_seqpar.training.checkpoints import CheckpointClock, last_checkpoint
from mllm_seqpar.training.finetune import fine_tune
from ranks import ranks
from ranks_worker import reset_global_state
from training_logs import assert_same_trajectory, fine_tuning, log_of

STEPS = 6  # two epochs
STOP, RESUMED_STOP = 4, 5  # in the second epoch of three steps


def arguments(files: Path, output: Path, *more: object) -> list[str]:
    size: tuple[object, ...] = () if "--global_batch_size" in more else ("--global_batch_size", 4)
    return fine_tuning(files, output, *size, *more)


def compared(files: Path, output: Path, *more: object) -> list[str]:
    """The arguments of the runs that are compared."""
    evaluation = ["--eval_data", files / "eval.jsonl", "--eval_strategy", "steps", "--eval_steps", STEPS // 2]
    return arguments(files, output, "--max_steps", STEPS, *evaluation, *more)


@pytest.fixture(scope="module")
def one_process(training_files: Path) -> Path:
    output = training_files / "one-process"
    assert fine_tune(compared(training_files, output)) == 0
    reset_global_state()
    return output


def whole_stopped_and_resumed(rank: int, world: int, files: Path) -> list[int]:
    """Run without interruption; then again, until rank 3 receives SIGTERM in step 4; then continue to step 5."""
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
    resumed = compared(
        files, files / "parts", *options, "--resume_from_checkpoint", "auto", "--stop_after", RESUMED_STOP
    )
    return [*statuses, fine_tune(resumed)]


@pytest.mark.slow
def test_two_groups_of_two_train_as_one_process_and_resume_bit_for_bit(training_files: Path, one_process: Path) -> None:
    statuses = ranks(4, launch_environment("configs/fsdp2_cpu_4.yaml")).run(whole_stopped_and_resumed, training_files)
    assert statuses == [[0, 128 + signal.SIGTERM, 0]] * 4
    whole, parts, expected = (log_of(training_files / name) for name in ("whole", "parts", "one-process"))
    assert_same_trajectory(whole, expected)
    assert [row["step"] for row in expected if "loss" in row] == [*range(1, STEPS + 1)]
    assert expected[-1]["eval_loss"] < expected[STEPS // 2]["eval_loss"]
    assert parts == [row for row in whole if row["step"] <= RESUMED_STOP] and parts[-1]["step"] == RESUMED_STOP
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


def two_steps(rank: int, world: int, files: Path, *options: object) -> None:
    fine_tune(compared(files, files / "two-steps", *options, "--stop_after", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "config", "options"),
    [
        # HSDP: the launch configuration shards the parameters over the two ranks that share a sample.
        (4, "configs/fsdp2_hsdp_cpu_2x2.yaml", ("--sp", 2)),
        # DDP: the tower has parameters without a gradient, for which Trainer does not look with checkpointing.
        (2, None, ("--sp", 1, "--gradient_checkpointing")),
    ],
)
def test_other_placements_of_weights_train_as_one_process(
    training_files: Path, one_process: Path, world: int, config: str | None, options: tuple[object, ...]
) -> None:
    shutil.rmtree(training_files / "two-steps", ignore_errors=True)
    ranks(world, launch_environment(config) if config else {}).run(two_steps, training_files, *options)
    assert_same_trajectory(log_of(training_files / "two-steps"), log_of(one_process)[:2])


def refused_and_stopped(rank: int, world: int, files: Path, bad: str) -> list[str]:
    """Return the errors of a run with different options, of one with broken media, and of one that skips them."""
    errors = []
    for more in ([["--strategy", "ring"], []][rank], [], ["--on_bad_media", "skip"]):
        argv = arguments(files, files / ("skip" if "skip" in more else "bad"), "--max_steps", 2, "--data", bad, *more)
        try:
            with mock.patch.dict(os.environ, FSDP_OFFLOAD_PARAMS=str(rank) if more[:1] == ["--strategy"] else "false"):
                fine_tune(argv)
            errors.append("")
        except SeqParError as error:
            errors.append(f"{type(error).__name__}: {error}")
        reset_global_state()
    return errors


@pytest.mark.slow
def test_errors_that_all_ranks_see_stop_them_together_after_a_checkpoint(training_files: Path) -> None:
    rows = (training_files / "train.jsonl").read_text().splitlines()
    record = json.loads(next(row for row in rows if '"video"' in row))
    record["messages"][0]["content"][0]["path"] = "broken.mp4"
    (training_files / "broken.mp4").write_bytes(b"no video")
    bad = training_files / "bad.jsonl"
    bad.write_text("\n".join([*[row for row in rows if '"video"' in row][:10], json.dumps(record)]))
    environment = launch_environment("configs/fsdp2_cpu_2.yaml")
    found = ranks(2, environment).run(refused_and_stopped, training_files, str(bad))
    for different, broken, skipped in found:
        assert "AgreementError: arguments: " in different and "strategy: rank 0: ring; rank 1: lv-xattn" in different
        assert "FSDP_OFFLOAD_PARAMS: rank 0: 0; rank 1: false" in different
        assert f"{bad}:11: " in broken and skipped == ""
    complete = last_checkpoint(training_files / "bad")
    assert complete is not None and not (training_files / "bad" / "model").exists()


def test_gradients_that_are_not_finite_stop_a_run(training_files: Path, tmp_path: Path) -> None:
    infinite = mock.patch.object(finetune_trainer.SeqParTrainer, "_get_grad_norm", lambda *_: torch.tensor(torch.nan))
    with infinite, pytest.raises(DataError, match="step 1: the gradient norm is nan, so the parameters were not"):
        fine_tune(arguments(training_files, tmp_path, "--max_steps", 2))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_evaluation_whose_loss_is_not_finite_is_an_error(training_files: Path, tmp_path: Path, strategy: str) -> None:
    model: Any = load_model(str(training_files / "model"))
    processor = load_processor(str(training_files / "model"))
    with torch.no_grad():
        model.get_input_embeddings().weight[processor.tokenizer.convert_tokens_to_ids("!")] = torch.inf
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "Look!"}, {"role": "assistant", "content": "red"}]
    (tmp_path / "eval.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    argv = ["--max_steps", 2, "--eval_data", tmp_path / "eval.jsonl", "--eval_strategy", strategy, "--eval_steps", 1]
    argv = arguments(training_files, tmp_path / "out", "--model", tmp_path / "model", *argv)
    with pytest.raises(NonFiniteLogitsError, match=f"evaluation after step {1 if strategy == 'steps' else 2} is nan"):
        fine_tune(argv)
    # Nothing is lost: the steps until then are saved, and the model of a run that is complete is written.
    assert (last_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoint-1") == (strategy == "steps")
    assert (tmp_path / "out" / "model" / "model.safetensors").exists() == (strategy == "no")
    for state in (tmp_path / "out").rglob("trainer_state.json"):
        assert json.loads(state.read_text(), parse_constant=pytest.fail)["global_step"]


@pytest.mark.slow
def test_adapters_outside_frozen_parts_are_trained_and_saved(training_files: Path, tmp_path: Path) -> None:
    options = ["--use_peft", "--lora_r", 4, "--freeze", "vision", "--max_steps", 2, "--save_strategy", "no"]
    fine_tune(arguments(training_files, tmp_path, *options))
    saved = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert saved and all("lora" in name and "vision_model" not in name for name in saved)
    assert any(weight.any() for name, weight in saved.items() if "lora_B" in name)
    assert json.loads((tmp_path / "model" / "adapter_config.json").read_text())["r"] == 4
    MPlugOwl3Processor.from_pretrained(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    metadata = ModelCard(card).data  # the Hub refuses a path as the base model
    assert (metadata.base_model, metadata.library_name, metadata.tags) == (None, "peft", ["lora", "mllm-seqpar"])
    assert f"fine-tuned from `{training_files / 'model'}`" in card
    assert "| `--lora_r` | 4 |" in card and "(12 samples) for 2 steps" in card and "More Information" not in card
    with pytest.raises(ConfigError, match=r"--lora_target_modules nothing: Target modules .*nothing"):
        fine_tune(arguments(training_files, tmp_path / "2", "--use_peft", "--lora_target_modules", "nothing"))


@pytest.mark.slow
def test_a_checkpoint_is_continued_with_the_same_data_only(training_files: Path, tmp_path: Path) -> None:
    argv = arguments(training_files, tmp_path / "out", "--max_steps", 3, "--global_batch_size", 2)
    other = arguments(training_files, tmp_path / "out", "--max_steps", 3, "--resume_from_checkpoint", "auto")
    fine_tune([*argv, "--stop_after", "1"])
    for given, message in (
        (argv, "has checkpoints of another run: use --resume_from_checkpoint auto"),
        ([*argv, "--resume_from_checkpoint", str(tmp_path)], "is not a complete checkpoint of this program"),
        (
            [*argv, "--resume_from_checkpoint", "auto", "--seed", "1"],
            "on other data, in another order, or with another --seed",
        ),
        (other, "step has 2 samples"),
    ):
        reset_global_state()
        with pytest.raises(ConfigError, match=message):
            fine_tune(given)


def test_every_checked_in_configuration_is_fsdp2() -> None:
    paths = sorted((ROOT / "configs").glob("fsdp2_*.yaml"))
    assert len(paths) >= 4
    for path in paths:
        config = yaml.safe_load(path.read_text())
        assert config["distributed_type"] == "FSDP", path
        assert config["fsdp_config"]["fsdp_version"] == 2, path
        assert config["use_cpu"] == ("cpu" in path.name), path
        assert config["num_processes"] % config["num_machines"] == 0, path


@pytest.mark.slow
def test_loss_does_not_depend_on_the_micro_batches_of_a_model_without_loss_arguments(
    training_files: Path, tmp_path: Path
) -> None:
    """OpenFlamingo's forward takes no `num_items_in_batch`, for which Trainer divides by the micro-batches itself."""
    without = mock.patch.object(MPlugOwl3ForConditionalGeneration, "accepts_loss_kwargs", False, create=True)
    for size in ("1", "4"):
        with without:
            fine_tune(
                arguments(training_files, tmp_path / size, "--max_steps", 1, "--per_device_train_batch_size", size)
            )
        reset_global_state()
    assert_same_trajectory(log_of(tmp_path / "1"), log_of(tmp_path / "4"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_a_run_that_stops_keeps_its_checkpoint_beside_the_best(
    training_files: Path, tmp_path: Path, strategy: str
) -> None:
    def worse_and_worse(self: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        return EvalLoopOutput(None, None, {"eval_loss": self.state.global_step}, 1)

    argv = arguments(training_files, tmp_path, "--max_steps", 3, "--save_steps", 1, "--save_strategy", strategy)
    argv += ["--eval_data", str(training_files / "eval.jsonl"), "--eval_strategy", "steps", "--eval_steps", "1"]
    argv += ["--load_best_model_at_end", "--save_total_limit", "1", "--stop_after", "2"]
    with mock.patch.object(finetune_trainer.FineTuneTrainer, "evaluation_loop", worse_and_worse):
        fine_tune(argv)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    reset_global_state()
    with pytest.raises(ConfigError, match="--stop_after 2: the steps of this run are 3 to 3; give one"):
        fine_tune([*argv, "--resume_from_checkpoint", "auto"])
    reset_global_state()

    # Saving replaces checkpoint-2, and until that is complete, checkpoint-1 is the last one.
    full = mock.patch.object(Trainer, "_save_checkpoint", side_effect=OSError("the disk is full"))
    evaluation = mock.patch.object(finetune_trainer.FineTuneTrainer, "evaluation_loop", worse_and_worse)
    with full, evaluation, pytest.raises(DataError, match="checkpoint-2 cannot be written .the disk is full.; free"):
        fine_tune([*argv, "--resume_from_checkpoint", str(tmp_path / "checkpoint-1")])
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


@pytest.mark.slow
def test_an_error_in_an_evaluation_stops_a_run_after_a_checkpoint(training_files: Path, tmp_path: Path) -> None:
    (tmp_path / "none.mp4").write_bytes(b"no video")
    question = [{"type": "video", "path": "none.mp4"}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "red"}]
    (tmp_path / "eval.jsonl").write_text(json.dumps({"messages": messages}))
    argv = arguments(training_files, tmp_path / "out", "--max_steps", 2, "--save_strategy", "no", "--eval_steps", 1)
    argv += ["--eval_data", str(tmp_path / "eval.jsonl"), "--eval_strategy", "steps"]
    with pytest.raises(SeqParError, match="none.mp4"):
        fine_tune(argv)
    assert last_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoint-1"
    reset_global_state()
    with pytest.raises(SeqParError, match="none.mp4"):
        fine_tune([*argv, "--resume_from_checkpoint", "auto"])
    assert last_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoint-2"


def with_sharded_weights(rank: int, world: int, files: Path) -> list[bool]:
    """Train for one step, and resume from a renamed checkpoint; return whether the environment was restored."""
    argv = compared(files, files / "sharded", "--shard_weights")
    fine_tune([*argv, "--stop_after", "1"])
    reset_global_state()
    if rank == 0:
        (files / "sharded" / "checkpoint-1").rename(files / "sharded" / "best")
    fine_tune([*argv, "--stop_after", "2", "--resume_from_checkpoint", str(files / "sharded" / "best")])
    return [name in os.environ for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION")]


@pytest.mark.slow
def test_weights_are_sharded_without_a_launch_configuration(training_files: Path, one_process: Path) -> None:
    found = ranks(2).run(with_sharded_weights, training_files)
    assert found == [[False, False]] * 2
    assert_same_trajectory(log_of(training_files / "sharded"), log_of(one_process)[:2])
    layout = json.loads((training_files / "sharded" / "checkpoint-2" / "seqpar_layout.json").read_text())
    assert layout["fsdp"] is True
    assert (training_files / "sharded" / "training.png").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "."), "no config.json there; give a directory that save_pretrained wrote"),
        (
            ("--sp", 3),
            "3 ranks per sample need 3 processes, or a multiple, and there is one; start them with a launcher",
        ),
        (("--stop_after", 9, "--max_steps", 2), "--stop_after 9: the steps of this run are 1 to 2; give one"),
    ],
)
def test_runs_that_cannot_begin_are_refused(
    training_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        fine_tune(arguments(training_files, tmp_path / "out", *options))
