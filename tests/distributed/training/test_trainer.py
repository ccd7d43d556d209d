"""Layer: gloo ranks. SeqParTrainer trains as transformers' Trainer trains the unpatched model in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_tiny import log_of, train, train_on_rank

from launch import launch_environment
from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model
from ranks import ranks
from ranks_worker import reset_global_state

FSDP2 = "configs/fsdp2_cpu_4.yaml"
FSDP2_WITH_CP = "configs/fsdp2_cp_cpu_4.yaml"


def train_in_one_process(output: Path, kind: str = "plain", **given: Any) -> list[dict[str, Any]]:
    """The log of transformers' Trainer, or of SeqParTrainer, in this process."""
    train(output, kind, given)
    reset_global_state()
    return log_of(output)


def train_on(world: int, output: Path, config: str | None, **given: Any) -> list[dict[str, Any]]:
    """The log of SeqParTrainer on `world` ranks, under the variables of an accelerate configuration."""
    env = {} if config is None else launch_environment(config)
    ranks(world, env).run(train_on_rank, output, "seqpar", given)
    return log_of(output)


def assert_same_trajectory(log: list[dict[str, Any]], expected: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    steps, expected_steps = ([row for row in rows if "loss" in row] for rows in (log, expected))
    assert [row["step"] for row in steps] == [row["step"] for row in expected_steps]
    for row, reference in zip(steps, expected_steps, strict=True):
        for name in names:
            assert row[name] == pytest.approx(reference[name], rel=1e-4), (name, row, reference)


def assert_same_evaluation(log: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for prefix in ("eval_10_", "eval_7_", "eval_5_"):
        row, reference = (next(row for row in rows if f"{prefix}loss" in row) for rows in (log, expected))
        assert row[f"{prefix}loss"] == pytest.approx(reference[f"{prefix}loss"], rel=1e-4), prefix
        for name in ("samples", "targets", "right"):  # each sample counts once, and logits are complete
            assert row[prefix + name] == reference[prefix + name], (prefix, name)


def test_one_process_trains_as_trainer_does(tmp_path: Path) -> None:
    """Trainer itself can train a patched model too, if no other rank shares its samples."""
    given = {"max_steps": 2, "per_device_train_batch_size": 4}
    expected = train_in_one_process(tmp_path / "plain", **given)
    for kind, patched in (("plain", True), ("seqpar", False)):
        log = train_in_one_process(tmp_path / f"{kind}-{patched}", kind, **given, patched=patched)
        assert_same_trajectory(log, expected, ("loss", "grad_norm", "num_input_tokens_seen"))


@pytest.mark.slow
def test_two_groups_of_two_train_evaluate_and_resume_as_one_process(tmp_path: Path) -> None:
    evaluation = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    evaluation |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_7_loss"}
    evaluation |= {"per_device_eval_batch_size": 2, "evaluate": "after"}
    expected = train_in_one_process(tmp_path / "one", per_device_train_batch_size=4, max_steps=8, **evaluation)
    given = {"per_device_train_batch_size": 2, "degree": 2, "max_steps": 8}
    log = train_on(4, tmp_path / "four", FSDP2, **given, **evaluation)
    assert_same_trajectory(log, expected, ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen"))
    assert_same_evaluation(log, expected)
    facts = json.loads((tmp_path / "four" / "facts.json").read_text())
    assert facts["self_attn_hooks"] == 0, "accelerate's context parallelism is active"
    assert facts["sharded"] == len(list(tiny_model("per_head").parameters()))
    trained = MPlugOwl3ForConditionalGeneration.from_pretrained(tmp_path / "four" / "model").state_dict()
    for name, weight in load_file(tmp_path / "one" / "model" / "model.safetensors").items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-3, atol=1e-5)

    resumed = train_on(4, tmp_path / "resumed", FSDP2, **given, resume=str(tmp_path / "four" / "checkpoint-4"))
    assert_same_trajectory(resumed, [row for row in expected if row["step"] > 4], ("loss", "grad_norm"))


@pytest.mark.slow
def test_degree_from_the_launch_config_with_lora_checkpointing_and_streams(tmp_path: Path) -> None:
    """The model is evaluated before any training."""
    given = {"lora": True, "gradient_checkpointing": True, "max_steps": 3, "stream": True}
    given |= {"evaluate": "before", "per_device_eval_batch_size": 2}
    expected = train_in_one_process(tmp_path / "one", **given, per_device_train_batch_size=4)
    log = train_on(4, tmp_path / "four", FSDP2_WITH_CP, **given, per_device_train_batch_size=2)
    assert_same_trajectory(log, expected, ("loss", "grad_norm"))
    assert_same_evaluation(log, expected)
    facts = json.loads((tmp_path / "four" / "facts.json").read_text())
    assert facts["degree"] == 2 and facts["self_attn_hooks"] == 0


@pytest.mark.slow
def test_ddp_with_mostly_frozen_parameters(tmp_path: Path) -> None:
    given = {"frozen": True, "max_steps": 3, "per_device_train_batch_size": 4}
    expected = train_in_one_process(tmp_path / "one", **given)
    log = train_on(3, tmp_path / "three", None, **given)
    assert_same_trajectory(log, expected, ("loss", "grad_norm", "num_input_tokens_seen"))
    assert log[-1]["total_flos"] == expected[-1]["total_flos"] > 0


@pytest.mark.slow
def test_plain_trainer_on_several_ranks_is_refused_because_samples_differ(tmp_path: Path) -> None:
    given = {"max_steps": 1, "patched": True}
    errors = ranks(2).errors(train_on_rank, tmp_path, "plain", given)
    assert all(isinstance(e, AgreementError) and "were given different inputs" in str(e) for e in errors), errors


@pytest.mark.slow
def test_a_launch_config_for_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    errors = ranks(2, launch_environment(FSDP2_WITH_CP)).errors(train_on_rank, tmp_path, "seqpar", {})
    message = "dp_shard_size=2, cp_size=2, tp_size=1, sp_size=1; the first three must multiply to the 2"
    assert all(isinstance(e, ConfigError) and message in str(e) for e in errors), errors
