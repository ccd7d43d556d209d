"""Layer: pure Python. Order of the data, schedule, arguments, metrics, messages."""

import json

import pytest
import torch

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.training.arguments import TRAJECTORY, TrainArguments, parse
from mllm_seqpar.training.learning_rate import learning_rate, warmup_steps
from mllm_seqpar.training.metrics import MetricsFile, read_metrics
from mllm_seqpar.training.parameters import choose_parameters
from mllm_seqpar.training.sample_order import TrainOrder, eval_order

NEEDED = ["--model", "m", "--data", "d", "--output", "o"]


def order(dp: int, micro_batch: int = 1, samples: int = 13) -> TrainOrder:
    return TrainOrder(samples=samples, global_batch=4, micro_batch=micro_batch, dp=dp, seed=3)


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_a_step_takes_the_same_samples_on_any_layout(dp: int, micro_batch: int) -> None:
    layout = order(dp, micro_batch)
    for step in range(7):
        alone = [sample for micro in order(1).step(step, 0) for sample in micro]
        groups = [layout.step(step, group) for group in range(dp)]
        assert {len(group) for group in groups} == {layout.micro_batches}
        together = [s for micros in zip(*groups, strict=True) for micro in micros for s in micro]
        assert together == alone


def test_an_epoch_has_every_sample_at_most_once_and_epochs_differ() -> None:
    plan = order(1)
    epochs = [
        [s for step in range(start, start + 3) for micro in plan.step(step, 0) for s in micro] for start in (0, 3)
    ]
    assert plan.steps_per_epoch == 3
    assert plan.position(4) == (1, 1)
    assert all(len(set(epoch)) == 12 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="--global-batch 4 is not a multiple of 3"):
        order(3)
    with pytest.raises(ConfigError, match="more than the 3 samples"):
        order(1, samples=3)


@pytest.mark.parametrize(("samples", "micro_batch", "dp"), [(5, 1, 1), (5, 2, 2), (1, 1, 4), (8, 3, 2)])
def test_evaluation_counts_every_sample_once_with_equal_passes(samples: int, micro_batch: int, dp: int) -> None:
    groups = [eval_order(samples, micro_batch, dp, group) for group in range(dp)]
    assert len({len(passes) for passes in groups}) == 1
    counted = sorted(s for passes in groups for own, counts in passes if counts for s in own)
    assert counted == list(range(samples))


def test_schedules_end_where_they_should() -> None:
    def rate(step: int, schedule: str) -> float:
        return learning_rate(step, steps=10, peak=2.0, floor=0.1, warmup=4, schedule=schedule)

    assert [rate(step, "linear") for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert [rate(4, name) for name in ("linear", "cosine", "constant")] == [2.0, 2.0, 2.0]
    assert rate(10, "linear") == pytest.approx(0.2)
    assert rate(10, "cosine") == pytest.approx(0.2)
    assert rate(7, "cosine") == pytest.approx(2.0 * 0.55)
    assert rate(10, "constant") == 2.0
    assert (warmup_steps(0.03, 100), warmup_steps(0, 10), warmup_steps(5, 100)) == (3, 0, 5)


def test_the_command_line_has_every_field() -> None:
    args = parse([*NEEDED, "--sp", "2", "--tile", "2x1", "--no-recompute-visual", "--fps", "0.5"])
    assert args == TrainArguments(model="m", data="d", output="o", sp=2, tile="2x1", recompute_visual=False, fps=0.5)
    assert args.tile_shape() == (2, 1)
    assert {name for name in TRAJECTORY if not hasattr(args, name)} == set()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "required"),
        ([*NEEDED, "--bogus"], "--bogus"),
        ([*NEEDED, "--sp", "two"], "invalid int"),
        ([*NEEDED, "--lr", "0"], "--lr: 0.0 is not allowed; give more than 0"),
        ([*NEEDED, "--schedule", "sine"], "cosine, linear, constant"),
        ([*NEEDED, "--tile", "4"], "two numbers such as 2x2"),
        ([*NEEDED, "--min-lr", "2"], "from 0 to 1"),
        ([*NEEDED, "--lr", "inf"], "--lr: inf is not allowed"),
        ([*NEEDED, "--seed", "-1"], "--seed: -1 is not allowed"),
        ([*NEEDED, "--strat", "ring"], "unrecognized arguments: --strat"),
        ([*NEEDED, "--steps", "3", "--epochs", "2"], "--epochs 2.0 would have no effect: --steps"),
        ([*NEEDED, "--steps", "3", "--stop-after", "4"], "--stop-after: 4 is not allowed; give at most --steps 3"),
        ([*NEEDED, "--eval-every", "3"], "--eval-every 3 would have no effect.*--eval-data"),
        ([*NEEDED, "--keep", "5"], "--keep 5 would have no effect.*--save-every"),
        ([*NEEDED, "--min-lr", "0.5", "--schedule", "constant"], "--min-lr 0.5 would have no effect"),
        ([*NEEDED, "--train", "vision"], "--train vision would have no effect: nothing is frozen"),
        ([*NEEDED, "--self-attention", "star"], "--self-attention: 'star' is not allowed; give one of ring"),
    ],
)
def test_bad_arguments_say_what_is_wrong(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(given)


@pytest.mark.parametrize(
    ("freeze", "train", "message"),
    [
        (",,", "", "--freeze ',,': names nothing"),
        ("0", "1", "--train 1: --freeze '0' covers none of these parameters"),
    ],
)
def test_choices_of_parameters_without_effect_are_refused(freeze: str, train: str, message: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=message):
        choose_parameters(model, freeze, train)
    choose_parameters(model, "0", "0.bias")
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


def test_metrics_are_cut_back_to_the_resumed_step(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, keep=0)
    for step in (1, 2, 3):
        file.write({"step": step, "loss": 0.1 * step})
    with path.open("a") as half:
        half.write('{"step": 4, "lo')
    MetricsFile(path, keep=2).write({"step": 3, "loss": 7.0})
    assert read_metrics(path) == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}, {"step": 3, "loss": 7.0}]
    path.write_text("hello\n" + json.dumps({"step": 1}) + "\n")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        read_metrics(path)
