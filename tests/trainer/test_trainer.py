"""Layer: real launch. SeqParTrainer trains as transformers' Trainer does with the unpatched model in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from safetensors.torch import load_file
from torch.utils.data import ChainDataset, DataLoader
from transformers import TrainingArguments

from launch import ROOT, launch
from mllm_seqpar import SeqParConfig, SeqParTrainer, patch_model
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate.context_parallel import keep_out_context_parallelism
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model
from mllm_seqpar.training.evaluation import counting_stream

pytestmark = pytest.mark.launch

SCRIPT = "tests/trainer/train_tiny.py"
FOUR = "configs/fsdp2_cpu_4.yaml"
WITH_CP = "configs/fsdp2_cp_cpu_4.yaml"
LIMIT = 240.0


def alone(output: Path, **given: Any) -> list[dict[str, Any]]:
    """transformers' own Trainer, the unpatched model, one process; its log."""
    command = [sys.executable, str(ROOT / SCRIPT), str(output), "plain", json.dumps(given)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return log_of(output)


def together(world: int, output: Path, config: str | None, **given: Any) -> list[dict[str, Any]]:
    """SeqParTrainer on `world` processes; its log."""
    done = launch(world, SCRIPT, output, "seqpar", json.dumps(given), config=config, timeout=LIMIT)
    assert done.returncode == 0, done.output[-4000:]
    return log_of(output)


def log_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def assert_same_course(found: list[dict[str, Any]], expected: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    steps = [row for row in expected if "loss" in row]
    mine = [row for row in found if "loss" in row]
    assert [row["step"] for row in mine] == [row["step"] for row in steps]
    for one, other in zip(mine, steps, strict=True):
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-4), (name, one, other)


def assert_same_evaluation(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for count in (10, 7, 5):  # a last batch that is full, that is cut, and that one group has nothing of
        start = f"eval_{count}_"
        mine, theirs = (next(row for row in log if f"{start}loss" in row) for log in (found, expected))
        assert mine[f"{start}loss"] == pytest.approx(theirs[f"{start}loss"], rel=1e-4), count
        for name in ("samples", "targets", "right"):  # each sample once, and whole logits
            assert mine[start + name] == theirs[start + name], (count, name)


def test_two_groups_of_two_and_resuming(tmp_path: Path) -> None:
    """20 steps of two batches each: loss, gradient norm, evaluation, the best model; and the same after a stop."""
    saved = {"save_strategy": "steps", "save_steps": 10, "eval_strategy": "steps", "eval_steps": 10}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_7_loss"}
    evaluation = {"per_device_eval_batch_size": 2, "evaluate": "after", **saved, **best}
    expected = alone(tmp_path / "alone", per_device_train_batch_size=4, **evaluation)
    given = {"per_device_train_batch_size": 2, "degree": 2}
    found = together(4, tmp_path / "four", FOUR, **given, **evaluation)
    assert_same_course(found, expected, ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen"))

    assert_same_evaluation(found, expected)
    facts = json.loads((tmp_path / "four" / "facts.json").read_text())
    assert facts["hooks on self_attn"] == 0  # of accelerate's context parallelism
    assert facts["sharded"] == len(list(tiny_model("per_head").parameters()))
    trained = MPlugOwl3ForConditionalGeneration.from_pretrained(tmp_path / "four" / "model").state_dict()
    for name, weight in load_file(tmp_path / "alone" / "model" / "model.safetensors").items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-3, atol=1e-5)

    resumed = together(4, tmp_path / "resumed", FOUR, **given, resume=str(tmp_path / "four" / "checkpoint-10"))
    assert_same_course(resumed, [row for row in expected if row["step"] > 10], ("loss", "grad_norm"))


def test_degree_from_the_launch_config_and_lora(tmp_path: Path) -> None:
    """accelerate's key parallelism_config_cp_size; adapters on cross- and self-attention, checkpointed layers; and
    streams of samples, which every rank reads. Evaluates before it trains."""
    given = {"lora": True, "gradient_checkpointing": True, "max_steps": 6, "stream": True}
    given |= {"evaluate": "before", "per_device_eval_batch_size": 2}
    expected = alone(tmp_path / "alone", **given, per_device_train_batch_size=4)
    found = together(4, tmp_path / "four", WITH_CP, **given, per_device_train_batch_size=2)
    assert_same_course(found, expected, ("loss", "grad_norm"))
    assert_same_evaluation(found, expected)
    facts = json.loads((tmp_path / "four" / "facts.json").read_text())
    assert facts["degree"] == 2 and facts["hooks on self_attn"] == 0


def test_without_fsdp_and_mostly_frozen(tmp_path: Path) -> None:
    """DDP, three ranks to a sample, as torchrun starts them; tower and most of the language model frozen."""
    given = {"frozen": True, "max_steps": 6, "per_device_train_batch_size": 4}
    expected = alone(tmp_path / "alone", **given)
    found = together(3, tmp_path / "three", None, **given)
    assert_same_course(found, expected, ("loss", "grad_norm", "num_input_tokens_seen"))
    assert found[-1]["total_flos"] == expected[-1]["total_flos"] > 0


def test_trainer_itself_on_one_process_and_on_several(tmp_path: Path) -> None:
    """Unchanged it trains a patched model on one process; on two, whose samples differ, it ends and says why."""
    given = {"max_steps": 3, "per_device_train_batch_size": 4}
    expected = alone(tmp_path / "alone", **given)
    assert_same_course(alone(tmp_path / "patched", **given, patched=True), expected, ("loss", "grad_norm"))
    text = json.dumps({**given, "patched": True})
    done = launch(2, SCRIPT, tmp_path / "two", "plain", text, timeout=LIMIT)
    assert done.returncode != 0 and "were given different inputs" in done.output, done.output[-4000:]


def test_a_launch_config_for_another_number_of_processes(tmp_path: Path) -> None:
    done = launch(2, SCRIPT, tmp_path, "seqpar", "{}", config=WITH_CP, timeout=LIMIT)
    assert done.returncode != 0
    assert "dp_shard_size=2, cp_size=2, tp_size=1, sp_size=1; the first three must multiply to the 2" in done.output


def test_a_stream_that_workers_read_cannot_be_counted() -> None:
    shard = IterableDatasetShard(ChainDataset([]), batch_size=2, num_processes=2)
    loader = DataLoader(shard, batch_size=2, num_workers=3)
    with pytest.raises(ConfigError, match="dataloader_num_workers=3 and .* over 2 groups"), counting_stream(loader):
        pass


def trainer(tmp_path: Path, model: Any = None, **given: Any) -> SeqParTrainer:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **given.pop("args", {}))
    return SeqParTrainer(model=model or tiny_model("per_head"), args=arguments, **given)


def test_bad_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 ranks to a sample do not divide 1 processes"):
        trainer(tmp_path, sequence_parallel_size=2)
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2, the group that the model is patched for is 1"):
        trainer(tmp_path, patch_model(tiny_model("per_head")), sequence_parallel_size=2)
    with pytest.raises(ConfigError, match="pass model="):
        SeqParTrainer(args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    smooth = trainer(tmp_path, args={"label_smoothing_factor": 0.1})
    with pytest.raises(ConfigError, match="label_smoothing_factor compute the loss from logits"):
        smooth.compute_loss(smooth.model, {})
    with pytest.raises(ConfigError, match="average_tokens_across_devices=False divides"):
        trainer(tmp_path, args={"average_tokens_across_devices": False})
    with pytest.raises(ConfigError, match="dispatch_batches=True lets rank 0 read"):
        trainer(tmp_path, args={"accelerator_config": {"dispatch_batches": True}})
    with pytest.raises(ConfigError, match="use_liger_kernel=True replaces the forward"):
        trainer(tmp_path, args={"use_liger_kernel": True})
    with pytest.raises(ConfigError, match="sequence_parallel_size='1' is no number of ranks"):
        trainer(tmp_path, sequence_parallel_size="1")
    with pytest.raises(ConfigError, match="seqpar=.*'ring'.* would be ignored: the model is patched already"):
        trainer(tmp_path, patch_model(tiny_model("per_head")), seqpar=SeqParConfig(strategy="ring"))
    with pytest.raises(ConfigError, match="no Accelerator._prepare_cp"):
        keep_out_context_parallelism(object())


def test_a_model_that_is_patched_already(tmp_path: Path) -> None:
    model = patch_model(tiny_model("per_head"), "ring")
    assert trainer(tmp_path, model).sequence_parallel_size == 1
