"""Layer: gloo ranks. The parallelism of the launch configuration: copies of the parameters (HSDP), and the cp axis."""

from pathlib import Path

import pytest
import torch

from launch import launch_environment
from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.integrations.accelerate.fsdp2 import shard_model
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model
from mllm_seqpar.training import loop
from mllm_seqpar.training.metrics import read_metrics
from mllm_seqpar.training.parallel_dims import launched_parallelism, make_parallel_dims, start_accelerator
from ranks import ranks

SIZES = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "CP_SIZE", "TP_SIZE")


def configured(*sizes: int) -> dict[str, str]:
    """The variables of `accelerate launch` for a configuration with these sizes."""
    given = dict(zip(SIZES, sizes, strict=False))
    return launch_environment("configs/fsdp2_cp_cpu_4.yaml") | {
        f"PARALLELISM_CONFIG_{name}": str(given.get(name, 1)) for name in SIZES
    }


def fine_tune(rank: int, world: int, *argv: str) -> None:
    loop.fine_tune(argv)


@pytest.mark.slow
def test_two_copies_of_the_parameters_train_and_resume_as_one_process(training_files: Path, tmp_path: Path) -> None:
    argv = ["--model", training_files / "model", "--data", training_files / "train.jsonl", "--no-progress"]
    argv = [*map(str, [*argv, "--steps", 3, "--global-batch", 4, "--lr", 1e-3, "--eps", 1e-4, "--output"])]
    loop.fine_tune([*argv, str(tmp_path / "one")])
    four = ranks(4, configured(2, 2))
    four.run(fine_tune, *argv, str(tmp_path / "four"), "--sp", "2", "--stop-after", "2")
    four.run(fine_tune, *argv, str(tmp_path / "four"), "--sp", "2", "--resume", "auto")
    found, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("four", "one"))
    for row, reference in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(reference[name], rel=1e-4), (name, row, reference)
    assert (tmp_path / "four" / "model" / "model.safetensors").exists()


def facts_of_cp_axis(rank: int, world: int) -> tuple[int, int, int]:
    accelerator, model = start_accelerator("cpu"), tiny_model().train()
    dims = make_parallel_dims(None, "cpu")
    with pytest.raises(ConfigError, match="--sp 1, but parallelism_config_cp_size of the accelerate config is 2"):
        make_parallel_dims(1, "cpu")
    model, _ = shard_model(accelerator, model, torch.optim.AdamW(model.parameters()))
    attention = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    return dims.dp, dims.sp, sum(len(module._forward_pre_hooks) for module in attention)


def test_cp_axis_is_the_default_of_sp_and_accelerate_adds_no_hooks() -> None:
    assert ranks(2, configured(1, 1, 2)).run(facts_of_cp_axis) == [(1, 2, 0)] * 2


def start_with_other_copies_on_rank_1(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", str(2 - rank))
        start_accelerator("cpu")


def test_different_configurations_on_two_nodes_are_refused() -> None:
    errors = ranks(2, configured(1, 2)).errors(start_with_other_copies_on_rank_1)
    found = "launch configuration: the ranks differ in PARALLELISM_CONFIG_DP_SHARD_SIZE: rank 0: 2; rank 1: 1"
    assert all(isinstance(error, AgreementError) and found in str(error) for error in errors), errors


@pytest.mark.parametrize("sizes", [(2, 1), (2, 4), (4, 1), (2, 1, 2), (1, 2, 1, 2)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in configured(*sizes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="parallelism_config of the accelerate config"):
        launched_parallelism(4)


def test_configuration_without_parallelism_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_parallelism(4) is None
    for name, value in configured(1, 1).items():
        monkeypatch.setenv(name, value)
    assert launched_parallelism(4) is None
