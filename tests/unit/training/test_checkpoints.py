"""Layer: one process, ranks as threads. When a run saves a checkpoint, and which ones it may continue."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.training import checkpoints
from mllm_seqpar.training.checkpoints import (
    CheckpointClock,
    RunLayout,
    checkpoint_step,
    last_checkpoint,
    require_shared_directory,
)


def clocks(monkeypatch: pytest.MonkeyPatch, act: Any) -> list[list[tuple[bool, bool]]]:
    """Return, for each of two ranks and each step, whether it saves and whether it stops."""
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: 60.0 * now[0]))
    now = [0]

    def rank(comm: Communicator) -> list[tuple[bool, bool]]:
        clock = CheckpointClock(comm, 30, stop_after=9)
        clock.on_train_begin(None, SimpleNamespace(global_step=0), None)
        found = []
        for step in range(1, 10):
            comm.gather_ints([0])  # the ranks take steps together
            if comm.rank == 0:
                now[0] += 10
            comm.gather_ints([0])
            act(clock, comm.rank, step)
            state = SimpleNamespace(global_step=step)
            control = SimpleNamespace(should_save=False, should_training_stop=False, should_evaluate=True)
            clock.on_step_end(None, state, control)
            assert control.should_evaluate is (clock.signal == 0)  # a process that received a signal may be killed soon
            if control.should_save:
                clock.on_save(None, state, control)
            found.append((control.should_save, control.should_training_stop))
        return found

    return run_loopback(2, rank, timeout=30)


def test_clock_of_rank_0_decides_when_all_ranks_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_clock(clock: Any, rank: int, step: int) -> None:
        if rank == 1:
            clock._since = 0.0 if step < 3 else 1e9

    first, second = clocks(monkeypatch, other_clock)
    assert first == second
    assert [step for step, (saves, _) in enumerate(first, 1) if saves] == [3, 6, 9]
    assert [stops for _, stops in first] == [False] * 8 + [True]


def test_signal_of_any_rank_makes_all_save_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(clock: Any, rank: int, step: int) -> None:
        if (rank, step) == (1, 2):
            clock._on_signal(signal.SIGTERM, None)

    first, second = clocks(monkeypatch, terminated)
    assert first == second and first[:2] == [(False, False), (True, True)]


def test_second_interrupt_is_not_delayed() -> None:
    clock = CheckpointClock(run_loopback(1, lambda comm: comm)[0], 0, None)
    clock._on_signal(signal.SIGINT, None)
    clock._on_signal(signal.SIGINT, None)  # the launcher's, for the same Ctrl-C
    clock._received_at -= 10
    with pytest.raises(KeyboardInterrupt):
        clock._on_signal(signal.SIGINT, None)


def test_interrupt_after_the_last_step_takes_effect() -> None:
    clock = CheckpointClock(run_loopback(1, lambda comm: comm)[0], 0, None)
    clock.raise_late_signal()
    clock._on_signal(signal.SIGINT, None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            clock.raise_late_signal()
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_complete_checkpoints_are_continued(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step, complete in ((9, True), (10, True), (11, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if complete:
            (tmp_path / f"checkpoint-{step}" / "seqpar_layout.json").touch()
    (tmp_path / "checkpoint-9").rename(tmp_path / "checkpoint-best")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_directory_that_some_ranks_do_not_share_is_refused_on_all(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("shared", "other", "shared")]
    (tmp_path / "other").mkdir()

    def check(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as error:
            require_shared_directory(comm, folders[comm.rank])
        return str(error.value)

    assert all("ranks 1 do not find the files of rank 0" in text for text in run_loopback(3, check))
    assert not [*(tmp_path / "shared").iterdir()]
    run_loopback(2, lambda comm: require_shared_directory(comm, tmp_path / "new"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: cannot be written to: "):
        run_loopback(1, lambda comm: require_shared_directory(comm, tmp_path / "file"))


def test_a_checkpoint_is_continued_only_with_the_samples_of_its_steps(tmp_path: Path) -> None:
    layout, old = RunLayout(samples=8, fsdp=True, data="digest/0"), tmp_path / "of version 0.2"
    layout.require_resumable(tmp_path)  # a checkpoint of Trainer says nothing
    layout.write(tmp_path)
    old.mkdir()
    written = {"processes": 4, "sequence_parallel_size": 2, "per_device_train_batch_size": 2}
    written |= {"gradient_accumulation_steps": 2, "fsdp": True, "data": "0123-4567/0"}
    (old / checkpoints.FILE).write_text(json.dumps(written))
    for path, run in ((tmp_path, layout), (tmp_path, replace(layout, data="")), (old, layout)):  # "": a user's data set
        run.require_resumable(path)
    for path, change, message in (
        (tmp_path, {"samples": 4}, "with 8 samples per step, but this run has 4 .*so that a step has 8 samples"),
        (tmp_path, {"fsdp": False}, "was written with FSDP, but this run is without FSDP"),
        (tmp_path, {"data": "other"}, "on other data, in another order, or with another --seed"),
        (old, {"samples": 4}, "was written by a run with 8 samples per step"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(layout, **change).require_resumable(path)


@pytest.mark.parametrize("content", [None, "", '{"epoch": 1.0, "glob', "[]", '{"unknown": 1}'])
def test_damaged_files_of_a_checkpoint_are_named(tmp_path: Path, content: str | None) -> None:
    layout, damaged = RunLayout(samples=8, fsdp=True), tmp_path / "checkpoint-2"
    for step in (1, 2):
        layout.write(tmp_path / f"checkpoint-{step}")
    state, written = damaged / "trainer_state.json", damaged / checkpoints.FILE
    if content is not None:
        state.write_text(content)
        written.write_text(content)
        with pytest.raises(DataError, match=f"{written}: this file of the checkpoint cannot be read .*checkpoint-1"):
            layout.require_resumable(damaged)
    with pytest.raises(DataError, match=f"{state}: .*resume from another .* beside it: {tmp_path}/checkpoint-1$"):
        checkpoint_step(damaged)


def test_layout_that_the_disk_has_no_space_for_leaves_the_checkpoint_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(path: Path, text: str) -> None:
        path.write_bytes(text[:10].encode())
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="no space left"):
        RunLayout(samples=8, fsdp=True).write(tmp_path / "checkpoint-1")
    assert last_checkpoint(tmp_path) is None
