"""Layer: real launch. The script as users start it: by accelerate, by torchrun, by python alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import HANG, ROOT, launch

pytestmark = pytest.mark.launch

SCRIPT = "scripts/infer_long_video.py"


def test_accelerate_launch(folder: Path) -> None:
    done = launch(
        2,
        SCRIPT,
        *("--model", folder / "gated", "--video", folder / "clip.mp4", "--fps", 3),
        *("--question", "What is it?", "--question", "Why?", "--max-new-tokens", 5),
        config="configs/fsdp2_cpu_2.yaml",
    )
    assert done.returncode == 0, done.output
    assert re.search(r"^> What is it\?\n.*\n> Why\?\n", done.output, re.MULTILINE)
    assert re.search(r"reading and encoding: 100%.* 12/12 ", done.output)
    closing = [line for line in done.output.splitlines() if "visual tokens" in line]
    assert len(closing) == 1
    assert re.search(
        r"12 frames, 48 visual tokens on 2 ranks; open \S+ s, load \S+ s, read and encode \S+ s \(\S+ frames/s\), "
        r"prefill \S+ s, decode \d+ tokens at \S+ tokens/s; peak memory by rank \(resident\) \d+, \d+ MiB$",
        closing[0],
    )


def test_a_part_that_one_rank_cannot_read_ends_all_with_one_line(folder: Path) -> None:
    data = bytearray((folder / "clip.mp4").read_bytes())
    start = len(data) * 3 // 4
    data[start : start + 600] = bytes(600)
    (folder / "broken.mp4").write_bytes(data)
    arguments = ("--model", folder / "gated", "--video", folder / "broken.mp4", "--fps", 25, "--question", "?")
    done = launch(2, SCRIPT, *arguments, "--no-progress")
    assert done.returncode != 0
    before, _, _ = done.output.partition("torch.distributed.elastic")  # the launcher's own account follows
    told = [line for line in done.output.splitlines() if "error: " in line]
    assert len(told) == 1 and re.search(r"rank 1: .*broken\.mp4: frame \d+ of 100 planned", told[0]), done.output
    assert "Traceback" not in before.partition(told[0])[0]


def test_python_alone_ends_with_one_line_and_status_2(folder: Path) -> None:
    command = [sys.executable, str(ROOT / SCRIPT), "--model", str(folder / "gated"), "--question", "?"]
    done = subprocess.run([*command, "--video", "none.mp4"], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none.mp4: no such file; give the path of a video file\n"
