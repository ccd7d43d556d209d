"""Layer: real launch. What launched programs do when they hang, and when a rank fails."""

import sys
from pathlib import Path

import pytest

from launch import LaunchHang, launch
from mllm_seqpar.training.resume import last_checkpoint

CONFIG = "configs/fsdp2_cpu_2.yaml"


@pytest.mark.slow
def test_a_hang_shows_the_output_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('about to hang'); time.sleep(600)")
    monkeypatch.setattr("launch._launcher", lambda *_: [sys.executable])
    with pytest.raises(LaunchHang, match=r"did not end within 1 s; it wrote:\n(.*\n)*about to hang"):
        launch(1, script, timeout=1)


@pytest.mark.launch
@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_all_and_leaves_the_last_checkpoint(training_files: Path, tmp_path: Path) -> None:
    argv = ["--model", training_files / "model", "--data", training_files / "train.jsonl", "--output_dir", tmp_path]
    argv += ["--max-steps", 4, "--save_steps", 2, "--global_batch_size", 4]
    failed = launch(2, "tests/launch/fine_tune_with_failing_rank.py", *argv, config=CONFIG)
    assert failed.returncode != 0
    assert "1 data parallel x 2 sequence parallel ranks" in failed.output, failed.output
    assert "[rank 1] error: clip.mp4: cannot be decoded" in failed.output, failed.output
    assert "[rank 0] stopped: another rank ended" in failed.output, failed.output
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
