"""Layer: one process. Which checkpoints a run may resume, and the numbers of a log row."""

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
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import patch_of
from mllm_seqpar.training.resume import RunLayout
from mllm_seqpar.training.throughput import Throughput
from tiny_models.mplug_owl3 import Case, inputs_of, tiny_model


def layout(processes: int, batch: int, fsdp: bool = True) -> RunLayout:
    sizes = {"sequence_parallel_size": 2, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 2}
    return RunLayout(processes=processes, fsdp=fsdp, **sizes)


def test_a_checkpoint_is_resumed_only_with_the_samples_of_its_steps(tmp_path: Path) -> None:
    layout(4, 2).require_resumable(tmp_path)  # a checkpoint of Trainer says nothing
    layout(4, 2).write(tmp_path)
    layout(2, 4).require_resumable(tmp_path)
    with pytest.raises(
        ConfigError, match=r"8 samples per step \(2 groups of 2 ranks.* has 4 samples .*step has 8 samples"
    ):
        layout(2, 2).require_resumable(tmp_path)
    with pytest.raises(ConfigError, match="was written with FSDP, but this run is without FSDP"):
        layout(4, 2, fsdp=False).require_resumable(tmp_path)


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
        patch.context.log_shard_sizes((1, 1), (5, 5))
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
