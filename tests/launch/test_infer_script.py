"""Layer: real launch. scripts/infer_long_video.py as users start it: by accelerate, and by python alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import HANG, ROOT, launch

SCRIPT = "scripts/infer_long_video.py"


@pytest.mark.launch
@pytest.mark.slow
def test_accelerate_launch_answers_and_reports(inference_files: Path) -> None:
    done = launch(
        2,
        SCRIPT,
        *("--model", inference_files / "gated", "--video", inference_files / "clip.mp4", "--fps", 3),
        *("--question", "What is it?", "--question", "Why?", "--max-new-tokens", 5),
        config="configs/fsdp2_cpu_2.yaml",
    )
    assert done.returncode == 0, done.output
    assert re.search(r"^> What is it\?\n.*\n> Why\?\n", done.output, re.MULTILINE)
    assert re.search(r"reading and encoding: 100%.* 12/12 ", done.output)
    summary = [line for line in done.output.splitlines() if "visual tokens" in line]
    assert len(summary) == 1
    assert re.search(
        r"12 frames, 48 visual tokens on 2 ranks; open \S+ s, load \S+ s, read and encode \S+ s \(\S+ frames/s\), "
        r"prefill \S+ s, decode \d+ tokens at \S+ tokens/s; peak memory by rank \(resident\) \d+, \d+ MiB$",
        summary[0],
    )


def test_python_alone_ends_with_one_line_and_status_2(inference_files: Path) -> None:
    command = [sys.executable, str(ROOT / SCRIPT), "--model", str(inference_files / "gated"), "--question", "?"]
    done = subprocess.run([*command, "--video", "none.mp4"], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none.mp4: no such file; give the path of a video file\n"
