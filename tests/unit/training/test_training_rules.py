"""Layer: pure Python. Order of the samples, learning rate, arguments, metrics file."""

import json

import pytest
import torch

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.training.arguments import TRAJECTORY, TrainArguments, parse
from mllm_seqpar.training.learning_rate import learning_rate, warmup_steps
from mllm_seqpar.training.metrics import MetricsFile, read_metrics
from mllm_seqpar.training.parameters import choose_parameters
from mllm_seqpar.training.sample_order import SampleOrder, eval_order

REQUIRED = ["--model", "m", "--data", "d", "--output", "o"]


def order(dp: int, micro_batch: int = 1, samples: int = 13) -> SampleOrder:
    return SampleOrder(samples=samples, global_batch=4, micro_batch=micro_batch, dp=dp, seed=3)


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 4), (2, 1), (2, 2), (4, 1)])
def test_a_step_has_the_same_samples_for_any_number_of_groups(dp: int, micro_batch: int) -> None:
    several = order(dp, micro_batch)
    for step in range(7):
        expected = [sample for micro in order(1).step(step, 0) for sample in micro]
        groups = [several.step(step, group) for group in range(dp)]
        assert {len(group) for group in groups} == {several.micro_batches}
        assert [s for micros in zip(*groups, strict=True) for micro in micros for s in micro] == expected


def test_an_epoch_has_every_sample_at_most_once_and_epochs_differ() -> None:
    epochs = [
        [s for step in range(start, start + 3) for micro in order(1).step(step, 0) for s in micro] for start in (0, 3)
    ]
    assert order(1).steps_per_epoch == 3 and order(1).position(4) == (1, 1)
    assert all(len(set(epoch)) == 12 for epoch in epochs) and epochs[0] != epochs[1]
    for options, message in (
        ({"dp": 3}, "--global-batch 4 is not a multiple of 3"),
        ({"dp": 1, "samples": 3}, "more than the 3 samples"),
    ):
        with pytest.raises(ConfigError, match=message):
            order(**options)


@pytest.mark.parametrize(("samples", "micro_batch", "dp"), [(5, 2, 2), (1, 1, 4)])
def test_evaluation_counts_every_sample_once_in_equally_many_passes(samples: int, micro_batch: int, dp: int) -> None:
    groups = [eval_order(samples, micro_batch, dp, group) for group in range(dp)]
    assert len({len(passes) for passes in groups}) == 1
    assert sorted(s for passes in groups for numbers, counts in passes if counts for s in numbers) == [*range(samples)]


def test_learning_rate_follows_warmup_and_schedule() -> None:
    def rate(step: int, schedule: str) -> float:
        return learning_rate(step, steps=10, peak=2.0, floor=0.1, warmup=4, schedule=schedule)

    assert [rate(step, "linear") for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert [rate(4, name) for name in ("linear", "cosine", "constant")] == [2.0, 2.0, 2.0]
    assert [rate(10, name) for name in ("linear", "cosine", "constant")] == pytest.approx([0.2, 0.2, 2.0])
    assert rate(7, "cosine") == pytest.approx(2.0 * 0.55)
    assert (warmup_steps(0.03, 100), warmup_steps(0, 10), warmup_steps(5, 100)) == (3, 0, 5)


def test_options_become_fields() -> None:
    args = parse([*REQUIRED, "--sp", "2", "--tile", "2x1", "--no-recompute-visual", "--fps", "0.5"])
    assert args == TrainArguments(model="m", data="d", output="o", sp=2, tile="2x1", recompute_visual=False, fps=0.5)
    assert args.mesh_shape() == (2, 1)
    assert all(hasattr(args, name) for name in TRAJECTORY)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lr", "0"], "--lr: 0.0 is not allowed; give more than 0"),
        (["--tile", "4"], "two numbers such as 2x2"),
        (["--lr", "inf"], "--lr: inf is not allowed"),
        (["--steps", "3", "--epochs", "2"], "--epochs 2.0 would have no effect: --steps"),
        (["--steps", "3", "--stop-after", "4"], "--stop_after: 4 is not allowed; give at most --steps 3"),
        (["--eval-every", "3"], "--eval_every 3 would have no effect.*--eval-data"),
        (["--train", "vision"], "--train vision would have no effect: nothing is frozen"),
        (["--self-attention", "star"], "--self_attention: 'star' is not allowed; give one of ring"),
    ],
)
def test_invalid_arguments_are_named(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([*REQUIRED, *given])


def test_parameters_are_frozen_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="--freeze ',,': names nothing"):
        choose_parameters(model, ",,", "")
    with pytest.raises(ConfigError, match="--train 1: --freeze '0' covers none of these parameters"):
        choose_parameters(model, "0", "1")
    choose_parameters(model, "0", "0.bias")
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


def test_metrics_are_truncated_to_the_resumed_step(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, keep=0)
    for step in (1, 2, 3):
        file.write({"step": step, "loss": 0.1 * step})
    with path.open("a") as incomplete:
        incomplete.write('{"step": 4, "lo')
    MetricsFile(path, keep=2).write({"step": 3, "loss": 7.0})
    assert read_metrics(path) == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}, {"step": 3, "loss": 7.0}]
    path.write_text("hello\n" + json.dumps({"step": 1}) + "\n")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        read_metrics(path)
