"""Layer: one process. What a run prints, draws and writes about itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.training import finetune, terminal_log
from mllm_seqpar.training.command_line import make_options, read_options
from mllm_seqpar.training.export import create_repository
from mllm_seqpar.training.summary import model_card
from mllm_seqpar.training.terminal_log import HEADER, TerminalLog, row, write_figure

LOG = {
    "loss": 1234.5678,
    "learning_rate": 1.2345e-05,
    "tokens_per_second": 1234567.8,
    "data_wait_seconds": 1234.56,
    "peak_memory_mib/rank_0": 1.0,
    "peak_memory_mib/rank_127": 81920.0,
    "peak_memory_mib/rank_5": 3.0,
}


def test_rows_fit_a_terminal_and_name_the_rank_with_the_highest_memory() -> None:
    found = row(LOG, 123_456, 999_999, "123:45:67")
    assert len(HEADER) <= len(found) <= 90 and len(row(LOG | {"loss": 0.5}, 1, 20, "0:01:00")) <= 90
    assert found.endswith("  80.0 GiB (rank 127)") and "peak_memory_mib" not in found
    assert row({"loss": 1.0, "learning_rate": 0.0}, 1, 2, "...").split() == ["1/2", "...", "1", "0", "0", "0.0", "s"]


def test_the_remaining_time_follows_from_the_steps_after_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal_log, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log, args = TerminalLog(), SimpleNamespace(disable_tqdm=True)
    state = SimpleNamespace(global_step=4, max_steps=10, is_world_process_zero=True)  # resumed after step 4
    log.on_train_begin(args, state, None)
    for seconds in (100, 3, 3):
        state.global_step += 1
        now[0] += seconds
        log.on_step_end(args, state, None)
        log.on_log(args, state, None, logs=LOG)
    log.on_log(args, state, None, logs={"eval_loss": 0.25})
    state.is_world_process_zero = False
    log.on_log(args, state, None, logs=LOG)
    header, *rows, evaluation = capsys.readouterr().out.splitlines()
    assert header == HEADER and [line.split()[:2] for line in rows] == [
        ["5/10", "..."],
        ["6/10", "0:00:12"],
        ["7/10", "0:00:09"],
    ]
    assert evaluation.split() == ["evaluation", "0.25", "after", "step", "7"]


def test_picture_of_a_run_is_written_with_and_without_evaluations(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps: list[dict[str, Any]] = [{"step": n, "loss": 1 / n, "learning_rate": 1e-5 * n} for n in range(1, 9)]
    assert write_figure([], tmp_path) is None
    for log in (steps, [*steps, {"step": 8, "eval_loss": 0.2}]):
        path = write_figure(log, tmp_path)
        assert path == tmp_path / "training.png" and path.read_bytes().startswith(b"\x89PNG")
        path.unlink()


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token: _api("http://127.0.0.1:9", token))
    args: Any = SimpleNamespace(
        hub_model_id=None, output_dir=str(tmp_path / "run"), hub_private_repo=None, hub_token="x"
    )
    with pytest.raises(
        ConfigError, match="--push_to_hub: the repository run cannot be created .*leave --push_to_hub out"
    ):
        create_repository(args)


def _api(endpoint: str, token: str) -> Any:
    from huggingface_hub.hf_api import HfApi

    return HfApi(endpoint=endpoint, token=token)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without a GPU")
def test_a_launch_configuration_for_gpus_is_refused_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(finetune, "make_options", lambda values: made.append(values))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="the launch configuration is for GPUs .*torch finds 0 .*pass --use_cpu"):
        finetune._options({"use_cpu": False}, cpu=True)
    finetune._options({"use_cpu": True}, cpu=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    finetune._options({"use_cpu": False}, cpu=True)
    assert made == [{"use_cpu": True}] * 2


@pytest.mark.parametrize(("model", "base"), [("user/name", "user/name"), ("user/name@a1b2", "user/name"), (".", None)])
def test_base_model_of_the_card_is_an_id_on_the_hub_or_left_out(model: str, base: str | None) -> None:
    given = ["--model", model, "--data", "d", "--output_dir", "o", "--use_cpu"]
    card = model_card(make_options(read_options(given)), [{"loss": 0.5}], samples=3, steps=2)
    assert (ModelCard(card).data.base_model, ModelCard(card).data.library_name) == (base, "transformers")
    assert "- last training loss: 0.5" in card and "(3 samples) for 2 steps" in card
