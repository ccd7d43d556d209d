"""Layer: one process. The numbers of a log row, what a run prints, and its figure."""

import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_seqpar import patch_model
from mllm_seqpar.comm.base import Recv, Send
from mllm_seqpar.comm.loopback import LoopbackCommunicator, run_loopback
from mllm_seqpar.patching import patch_of
from mllm_seqpar.training import run_log
from mllm_seqpar.training.run_log import HEADER, TerminalLog, Throughput, row, write_figure
from model_copies import tiny_model
from tiny_models.mplug_owl3 import Case, inputs_of

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
    assert len(HEADER) <= len(found) <= 95 and len(row(LOG | {"loss": 0.5}, 1, 20, "0:01:00")) <= 95
    assert found.endswith("  80.0 GiB (rank 127)") and "peak_memory_mib" not in found
    assert row({"loss": 1.0, "learning_rate": 0.0}, 1, 2, "...").split() == ["1/2", "...", "1", "0", "0", "0.0", "s"]
    for logs, eta in ((LOG | {"loss": 0.0006613}, "0:09:02"), (LOG | {"loss": -1.234e-05}, "1 day, 10:09:02")):
        found = row(logs, 123_456, 999_999, eta)  # columns stay apart however long their values are
        assert f"  {eta}  " in found and f"  {logs['loss']:.4g}  " in found
    assert HEADER.split() == "step ETA loss learning rate tokens/s data wait peak memory".split()
    line = row(LOG | {"loss": 0.5}, 1, 20, "0:01:00")
    for text, name in (("1/20", "step"), ("0:01:00", "ETA"), ("0.5", "loss")):
        assert line.index(text) + len(text) == HEADER.index(name) + len(name)


def test_the_remaining_time_follows_from_the_steps_after_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(run_log, "time", SimpleNamespace(monotonic=lambda: now[0]))
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


def test_a_log_row_has_the_tokens_frames_and_waiting_of_its_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    model = patch_model(tiny_model())
    patch, inputs = patch_of(model), inputs_of(Case(frames=(3, 1), length=13, padding="right"), model)
    assert patch is not None
    throughput = Throughput(patch, torch.device("cpu"))

    class TwoRanks:
        def gather(self, rows: Any) -> Any:
            other = rows.clone()
            other[:, 2:] += 1  # waits longer, and needs more memory
            return torch.cat([rows, other])

    def step() -> None:
        with throughput.step(inputs):
            model(**inputs)
            patch.context.comm.bytes.waited += 0.25
            now[0] += 1

    for _ in range(2):
        step()
        model(**inputs)  # an evaluation
        with throughput.pause():
            now[0] += 100
    report = throughput.report(TwoRanks(), degree=2)
    assert report["frames_per_second"] == 4 and report["tokens_per_second"] == 24
    assert report["exposed_communication_seconds"] == 1.5
    assert report["peak_memory_mib/rank_1"] == pytest.approx(report["peak_memory_mib/rank_0"] + 1)
    step()
    assert throughput.report(TwoRanks(), degree=1)["tokens_per_second"] == 48  # two groups


def test_a_step_and_a_wait_that_end_with_an_error_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run may continue: out of memory is caught, for example."""
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    patch = patch_of(patch_model(tiny_model()))
    assert patch is not None
    throughput = Throughput(patch, torch.device("cpu"))
    with suppress(MemoryError), throughput.step({}):
        patch.context.count_shards((1, 1), (5, 5))
        now[0] += 1
        raise MemoryError
    for interval in (throughput.data_wait(), throughput.pause()):
        with suppress(MemoryError), interval:
            now[0] += 2
            raise MemoryError
    report = throughput.report(SimpleNamespace(gather=lambda rows: rows), degree=1)
    assert report["data_wait_seconds"] == 2 and report["frames_per_second"] == 5 / 3


def test_the_time_until_a_message_arrives_is_counted() -> None:
    def exchange(comm: LoopbackCommunicator) -> tuple[float, float]:
        other, buffer = 1 - comm.rank, torch.empty(3)
        pending = comm.exchange([Send(other, torch.ones(3), "x")], [Recv(other, buffer)])
        posted = comm.bytes.waited
        pending.wait()
        waited = comm.bytes.waited
        comm.bytes.reset()
        assert comm.bytes.waited == 0
        return posted, waited

    assert all(posted == 0 < waited for posted, waited in run_loopback(2, exchange))
