"""Layer: real launch. The entry scripts by accelerate and by python alone; a failing rank, and a resumed run.

The reference of fine-tuning is an uninterrupted run on the worker pool, with the options of test_fine_tune.py.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch import HANG, ROOT, LaunchHang, launch, launch_environment
from mllm_seqpar.training import loop
from mllm_seqpar.training.metrics import read_metrics
from ranks import ranks

CONFIG = "configs/fsdp2_cpu_2.yaml"
SCRIPT = "scripts/infer_long_video.py"


@pytest.mark.launch
@pytest.mark.slow
def test_accelerate_launch_answers_and_reports(inference_files: Path, tmp_path: Path) -> None:
    arguments = ["--model", inference_files / "gated", "--video", inference_files / "clip.mp4", "--fps", 3]
    arguments += ["--question", "What is it?", "--question", "Why?", "--max-new-tokens", 5]
    arguments += ["--evidence", 2, "--evidence-html", tmp_path / "pages" / "evidence.html"]
    done = launch(2, SCRIPT, *arguments, config=CONFIG)
    assert done.returncode == 0, done.output
    assert re.search(r"^> What is it\?\n(.*\n)+> Why\?\n", done.output, re.MULTILINE)
    assert len(re.findall(r"^moments that .*:\n +1\. +\d+\.\d%  0:0\d\.\d to 0:0", done.output, re.MULTILINE)) == 2
    assert (tmp_path / "pages" / "evidence.html").read_text().count('"mean":') == 2
    assert re.search(r"reading and encoding: 100%.* 12/12 ", done.output)
    (summary,) = [line for line in done.output.splitlines() if "visual tokens" in line]
    assert re.search(
        r"12 frames, 48 visual tokens on 2 ranks; open \S+ s, load \S+ s, read and encode \S+ s \(\S+ frames/s\), "
        r"prefill \S+ s, decode \d+ tokens at \S+ tokens/s; peak memory by rank \(resident\) \d+, \d+ MiB$",
        summary,
    )


@pytest.mark.slow
def test_python_alone_ends_with_one_line_and_status_2(inference_files: Path) -> None:
    command = [sys.executable, str(ROOT / SCRIPT), "--model", str(inference_files / "gated"), "--question", "?"]
    done = subprocess.run([*command, "--video", "none.mp4"], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none.mp4: no such file; give the path of a video file\n"


@pytest.mark.slow
def test_a_hang_shows_the_output_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('about to hang'); time.sleep(600)")
    monkeypatch.setattr("launch._launcher", lambda *_: [sys.executable])
    with pytest.raises(LaunchHang, match=r"did not end within 1 s; it wrote:\n(.*\n)*about to hang"):
        launch(1, script, timeout=1)


def fine_tune(rank: int, world: int, argv: list[str]) -> None:
    loop.fine_tune(argv)


def rows_of(output: Path) -> list[dict[str, Any]]:
    rows = read_metrics(output / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("seconds", "peak_memory_mib")} for row in rows]


@pytest.mark.launch
@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_the_run_resumes_bit_for_bit(training_files: Path, tmp_path: Path) -> None:
    common = ["--model", training_files / "model", "--data", training_files / "train.jsonl", "--no-progress"]
    common += ["--steps", 4, "--save-every", 2, "--global-batch", 4, "--lr", 1e-3, "--eps", 1e-4]
    output = tmp_path / "launched"
    failed = launch(2, "tests/launch/fine_tune_with_failing_rank.py", *common, "--output", output, config=CONFIG)
    assert failed.returncode != 0
    assert "[rank 1] error: clip.mp4: cannot be decoded" in failed.output, failed.output
    assert "[rank 0] stopped: another rank ended" in failed.output, failed.output

    resumed = launch(2, "scripts/finetune.py", *common, "--output", output, "--resume", "auto", config=CONFIG)
    assert resumed.returncode == 0, resumed.output
    assert "1 data parallel x 2 sequence parallel ranks" in resumed.output
    assert f"continuing from {output}/checkpoint-00000002" in resumed.output

    reference = tmp_path / "reference"
    ranks(2, launch_environment(CONFIG)).run(fine_tune, [*map(str, common), "--output", str(reference)])
    assert rows_of(output) == rows_of(reference)
    weights = load_file(output / "model" / "model.safetensors")
    for name, expected in load_file(reference / "model" / "model.safetensors").items():
        assert torch.equal(weights[name], expected), name
