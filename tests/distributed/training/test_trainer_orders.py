"""Layer: gloo ranks. Evaluating, predicting, training and resuming in any order gives what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from family_harness import family_module
from launch import launch_environment
from mllm_seqpar import SeqParTrainer, patch_model
from mllm_seqpar.errors import AgreementError
from ranks import ranks
from ranks_worker import reset_global_state
from selections import slow_unless
from tiny_models.mllama import Case as Mllama
from tiny_models.qwen2_5_vl import Case as Qwen2_5

FSDP2 = "configs/fsdp2_cpu_2.yaml"
CASES: dict[str, Any] = {
    "mllama": Mllama(frames=((2, 1),), length=14),
    "qwen2_5_vl": Qwen2_5(frames=(((2, 4, 4),),), length=24),
}
ARGUMENTS: dict[str, Any] = {"use_cpu": True, "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant"}
ARGUMENTS |= {"max_grad_norm": 0.0, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "max_steps": 2}
ARGUMENTS |= {"save_strategy": "no", "remove_unused_columns": False, "prediction_loss_only": True}
ARGUMENTS |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}


class Samples(torch.utils.data.Dataset):
    """The same batch of one sample, several times."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.batch


class Run:
    """Trainers on one model, and the losses that they have found, in order."""

    def __init__(self, family: str, output: Path, degree: int) -> None:
        self.family, self.output, self.degree = family, output, degree
        self.losses: list[float] = []
        module = family_module(family)
        self.samples = Samples(module.inputs_of(CASES[family], module.tiny_model()))

    def model(self) -> Any:
        return family_module(self.family).tiny_model()

    def trainer(self, model: Any, **given: Any) -> Any:
        common: dict[str, Any] = {
            **{"model": model, "train_dataset": self.samples, "eval_dataset": self.samples},
            "args": TrainingArguments(output_dir=str(self.output), **ARGUMENTS | given),
            "data_collator": lambda rows: dict(rows[0]),
        }
        if self.degree == 1:
            return Trainer(**common)
        return SeqParTrainer(**common, sequence_parallel_size=self.degree)

    def evaluate(self, trainer: Any) -> None:
        self.losses.append(trainer.evaluate()["eval_loss"])

    def train(self, trainer: Any, **given: Any) -> None:
        trainer.train(**given)
        last = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        self.losses += [last[step] for step in sorted(last)[-2:]]


def evaluate_first(run: Run) -> None:
    trainer = run.trainer(run.model())
    run.evaluate(trainer)
    run.train(trainer)
    run.evaluate(trainer)
    run.train(trainer)


def predict_first(run: Run) -> None:
    trainer = run.trainer(run.model())
    trainer.predict(run.samples)
    run.train(trainer)


def evaluate_in_bf16_first(run: Run) -> None:
    trainer = run.trainer(run.model(), bf16=True)
    run.evaluate(trainer)
    run.train(trainer)


def freeze_after_evaluation(run: Run) -> None:
    model = run.model()
    trainer = run.trainer(model)
    run.evaluate(trainer)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lm_head" in name)
    run.train(trainer)


def two_trainers_by_turns(run: Run) -> None:
    model = run.model()
    first, second = run.trainer(model), run.trainer(model)
    run.evaluate(first)
    run.train(second)
    run.evaluate(first)
    run.train(first)
    run.train(second)


def resume(run: Run) -> None:
    run.train(run.trainer(run.model(), save_strategy="steps", save_steps=2))
    trainer = run.trainer(run.model(), max_steps=4)
    run.evaluate(trainer)
    run.train(trainer, resume_from_checkpoint=True)


ORDERS = {order.__name__: order for order in (evaluate_first, predict_first, freeze_after_evaluation)}
ORDERS |= {order.__name__: order for order in (evaluate_in_bf16_first, two_trainers_by_turns, resume)}


def losses_of(rank: int, world: int, output: Path, order: str, family: str) -> list[float]:
    run = Run(family, output, world)
    ORDERS[order](run)
    return run.losses


def in_one_process(output: Path, order: str, family: str = "mllama") -> list[float]:
    """Return the losses of `Trainer`; it continues an unbroken run where it would not find the weights to resume."""
    if order == "resume":
        run = Run(family, output, 1)
        trainer, fresh = run.trainer(run.model()), run.trainer(run.model())
        run.train(trainer)
        run.evaluate(fresh)
        run.train(trainer)
    else:
        run = Run(family, output, 1)
        ORDERS[order](run)
    reset_global_state()
    return run.losses


QUICK = {("evaluate_first", None)}
RUNS = [(order, config) for order in ORDERS for config in (None, FSDP2) if config is None or "bf16" not in order]


@pytest.mark.parametrize(("order", "config"), slow_unless(lambda run: run in QUICK, RUNS))
def test_order_equals_one_process(tmp_path: Path, order: str, config: str | None) -> None:
    expected = in_one_process(tmp_path / "one", order)
    env = {} if config is None else launch_environment(config)
    for losses in ranks(2, env).run(losses_of, tmp_path / "two", order, "mllama"):
        assert losses == pytest.approx(expected, rel=2e-2 if "bf16" in order else 1e-3)


@pytest.mark.slow
def test_resuming_finds_weights_that_have_other_names_in_the_checkpoint(tmp_path: Path) -> None:
    """transformers saves Qwen2.5-VL, too, under the names of its published checkpoints."""
    expected = in_one_process(tmp_path / "one", "resume", "qwen2_5_vl")
    for losses in ranks(2).run(losses_of, tmp_path / "two", "resume", "qwen2_5_vl"):
        assert losses == pytest.approx(expected, rel=1e-3)


def without_averaging(rank: int, world: int) -> str:
    """Evaluate a few batches, then train without DDP; return the error."""
    model = patch_model(family_module("mllama").tiny_model())
    inputs = family_module("mllama").inputs_of(CASES["mllama"], model)
    with torch.no_grad():
        for _ in range(5):
            model(**inputs)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with pytest.raises(AgreementError) as raised:
        for _ in range(2):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return str(raised.value)


def test_weights_that_drift_apart_after_an_evaluation_are_noticed() -> None:
    assert all("digest of weights" in message for message in ranks(2).run(without_averaging))
