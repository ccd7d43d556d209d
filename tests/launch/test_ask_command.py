"""Layer: real launch. A data set of questions on two groups of processes: a bad video, a kill, and going on."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import HANG
from mllm_seqpar.inference.ask import ask
from ranks import ranks

pytestmark = [pytest.mark.launch, pytest.mark.slow]

VIDEOS = 4
BAD = 3


def arguments(folder: Path, files: Path, output: Path, *options: Any) -> list[str]:
    argv = ["--model", files / "gated", "--questions", folder / "questions.jsonl", "--output", output, *options]
    return [*map(str, [*argv, "--device", "cpu", "--num_frames", 4, "--max_new_tokens", 4])]


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer(rank: int, world: int, argv: list[str]) -> tuple[int | None, str]:
    """Run the command on this rank, and return its exit status and what it wrote to standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        return ask(argv), stderr.getvalue()


def test_killed_groups_go_on_and_answer_as_one_process(inference_files: Path, tmp_path: Path) -> None:
    content = (inference_files / "clip.mp4").read_bytes()
    for number in range(VIDEOS):
        # The end of the file is lost: it opens, and one rank of its group finds the damage while it reads.
        (tmp_path / f"{number}.mp4").write_bytes(content[: len(content) * 3 // 4] if number == BAD else content)
    rows = [{"video": f"{number}.mp4", "question": "What is it?", "id": f"v{number}"} for number in range(VIDEOS)]
    rows += [{"video": f"{number}.mp4", "question": "Why?"} for number in range(VIDEOS)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    one, four = tmp_path / "one.jsonl", tmp_path / "four.jsonl"
    command = [sys.executable, "-m", "mllm_seqpar", "ask"]
    single = [*command, *arguments(tmp_path, inference_files, four, "--num_processes", 2, "--sp", 1)]
    killed = subprocess.Popen(single, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + HANG
    while not (four.exists() and four.read_text().count("\n") >= 2):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = four.read_text()

    status, stderr = ranks(4).run(answer, arguments(tmp_path, inference_files, four, "--sp", 2))[0]
    assert status == 1, stderr  # some questions have no answer
    assert f"{2 * VIDEOS - 2} of {2 * VIDEOS} questions are answered; errors: 2" in stderr
    lines = answers(four)
    assert [line["index"] for line in lines] == [*range(2 * VIDEOS)]
    assert [line["index"] for line in lines if "error" in line] == [BAD, VIDEOS + BAD]
    kept = [json.loads(row) for row in before.split("\n")[:-1]]
    assert all(lines[line["index"]] == line for line in kept if "error" not in line) and len(kept) >= 2
    ask(arguments(tmp_path, inference_files, one))
    assert [line.get("answer") for line in answers(one)] == [line.get("answer") for line in lines]
