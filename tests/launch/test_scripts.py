"""Layer: real launch. What launched programs do when they hang, and when a rank fails."""

from pathlib import Path

import pytest

from launch import PYTHON, LaunchHang, launch
from mllm_seqpar.training.checkpoints import last_checkpoint
from mllm_seqpar.training.finetune import fine_tune
from training_logs import assert_same_trajectory, fine_tuning, log_of

CONFIG = "configs/fsdp2_cpu_2.yaml"


@pytest.mark.slow
def test_a_hang_shows_the_output_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('about to hang'); time.sleep(600)")
    monkeypatch.setattr("launch._launcher", lambda *_: PYTHON[:1])
    with pytest.raises(LaunchHang, match=r"did not end within 1 s; it wrote:\n(.*\n)*about to hang"):
        launch(1, script, timeout=1)


@pytest.mark.launch
@pytest.mark.slow
def test_launched_ranks_train_as_one_process_and_end_when_one_fails(training_files: Path, tmp_path: Path) -> None:
    options = ("--max-steps", 4, "--save_steps", 2, "--global_batch_size", 4)
    argv = fine_tuning(training_files, tmp_path, *options)
    failed = launch(2, "tests/launch/fine_tune_with_failing_rank.py", *argv, config=CONFIG)
    assert failed.returncode != 0
    assert "1 data parallel x 2 sequence parallel ranks" in failed.output, failed.output
    assert "[rank 1] error: clip.mp4: cannot be decoded" in failed.output, failed.output
    assert "[rank 0] stopped: another rank ended" in failed.output, failed.output
    last = [line for line in failed.output.splitlines() if line.strip("= ")][-1]  # of the launcher's report
    assert last == "  traceback : error: clip.mp4: cannot be decoded", failed.output
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    fine_tune(fine_tuning(training_files, tmp_path / "one", *options, "--stop_after", 2))
    assert_same_trajectory(log_of(tmp_path / "checkpoint-2"), log_of(tmp_path / "one"))
