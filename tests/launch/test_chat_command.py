"""Layer: real launch. The chat in a pseudo-terminal, on ranks that it starts itself; Ctrl-C stops an answer only."""

import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from conversation_cases import replies_in_one_process, reply_in_one_process
from launch import HANG, ROOT
from mllm_seqpar.data import VideoSource

pytestmark = [pytest.mark.launch, pytest.mark.slow]
COMMAND = ["-m", "mllm_seqpar", "chat"]


class Terminal:
    """A command in a pseudo-terminal that it controls, as in a terminal window."""

    def __init__(self, *argv: Any) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in background jobs of shells
            os.environ.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", TERM="dumb")
            os.chdir(ROOT)
            os.execv(sys.executable, [sys.executable, *COMMAND, *map(str, argv)])
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, pattern: str) -> str:
        """Return the output up to a match of the pattern; what follows is left for the next call."""
        deadline = time.monotonic() + HANG
        while not (found := re.search(pattern, self.output)):
            ready, _, _ = select.select([self._fd], [], [], 1.0)
            try:
                block = os.read(self._fd, 4096) if ready else None
            except OSError:  # the other end has closed
                block = b""
            if block == b"" or time.monotonic() > deadline:
                raise AssertionError(f"{pattern!r} does not follow in {self.output!r}")
            self.output += (block or b"").decode()
        before, self.output = self.output[: found.end()], self.output[found.end() :]
        return before.replace("\r\n", "\n")

    def wait(self) -> int:
        """Return the exit status of the command, which has to end in time."""
        deadline = time.monotonic() + HANG
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"the command does not end; its last output is {self.output!r}")
            time.sleep(0.05)
        return os.waitstatus_to_exitcode(ended[1])


@pytest.fixture(autouse=True)
def history_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the history of the user's chats alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_further_video_in_a_terminal_on_two_ranks(inference_files: Path) -> None:
    """`/add` shows it with the next question, whose answer is that of one prompt with both videos."""
    model, clip, twin = (inference_files / name for name in ("gated", "clip.mp4", "twin.mp4"))
    options = ["--num-frames", 5, "--max-new-tokens", 6, "--num_processes", 2]
    terminal = Terminal("--model", model, "--video", clip, *options)
    terminal.read_until(r"5 frames, from 0.40 s to 3.60 s\r\n> ")
    sources = [VideoSource.open(path, num_frames=5) for path in (clip, twin)]
    messages: list[Any] = []
    for number, question in enumerate(("What is it?", "And this?", "Why?"), 1):
        if number == 2:
            terminal.type(f"/add {twin}\n")
            assert "twin.mp4: 5 frames" in terminal.read_until("> ")
        media = [{"type": "video"}] if number < 3 else []
        messages.append({"role": "user", "content": [*media, {"type": "text", "text": question}]})
        reply = reply_in_one_process(model, messages, sources[:number], 6)
        messages.append({"role": "assistant", "content": reply.text})
        terminal.type(f"{question}\n")
        assert reply.text.strip() in terminal.read_until(r"tokens and was cut off\r\n> ")
    terminal.type("/exit\n")
    assert terminal.wait() == 0


def test_turns_in_a_terminal_on_two_ranks(inference_files: Path) -> None:
    twin = inference_files / "twin.mp4"
    model = inference_files / "gated"
    replies = replies_in_one_process(model, inference_files / "clip.mp4", ("What is it?", "Why?"), 5, 6)
    replies += replies_in_one_process(model, twin, ("What is it?",), 5, 6)
    replies += replies_in_one_process(model, twin, ("Hello",), 5, 6)
    options = ["--model", inference_files / "gated", "--num-frames", 5, "--max-new-tokens", 6]
    terminal = Terminal(*options, "--video", inference_files / "clip.mp4", "--num_processes", 2)
    assert "gated on 2 ranks" in terminal.read_until(r"5 frames, from 0.40 s to 3.60 s\r\n> ")

    def ask(question: str) -> str:
        terminal.type(f"{question}\n")
        return terminal.read_until(r"tokens and was cut off\r\n> ")

    answers = [ask("What is it?"), ask("Why?")]
    terminal.type("/evidence\n")
    assert re.search(r"\d\.\d%  0:0\d\.\d to 0:0\d\.\d  frames? \d", terminal.read_until("> "))
    terminal.type(f"/video {twin}\n")
    assert "twin.mp4: 5 frames" in terminal.read_until("> ")
    answers.append(ask("What is it?"))
    terminal.type("/reset\n")
    terminal.read_until("a new conversation begins\r\n> ")
    answers.append(ask("Hello"))
    for answer, reply in zip(answers, replies, strict=True):
        assert f"\n{reply.text}\n" in answer
    terminal.type("/frames 3\n")
    assert "twin.mp4: 3 frames" in terminal.read_until("> ")
    terminal.type("/clip 1 2\n")
    assert "twin.mp4: 3 frames, from 1.17 s to 1.83 s" in terminal.read_until("> ")
    terminal.type("/clip 2\n")
    assert "/clip 2: give two times in seconds" in terminal.read_until("> ")
    terminal.type("/video none.mp4\n")
    assert "none.mp4: cannot be read (No such file" in terminal.read_until("> ")
    terminal.type("/what\n")
    assert "/what: there is no such command" in terminal.read_until("Ctrl-C stops an answer.\r\n> ")
    terminal.type("\x04")
    assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_a_lost_rank_the_program(inference_files: Path) -> None:
    options = ["--model", inference_files / "gated", "--num-frames", 5, "--max-new-tokens", 3000]
    terminal = Terminal(*options, "--video", inference_files / "clip.mp4", "--num_processes", 2)
    terminal.read_until(r"\r\n> ")
    for question in ("What is it?", "Why?"):
        terminal.type(f"{question}\n")
        terminal.read_until(re.escape(question) + r"\r\n[^>]*\w ")
        terminal.type("\x03")
        terminal.read_until(r"\r\nstopped\r\n> ")
        for _ in range(5):  # at once after the prompt, when `input` does not wait for a key yet
            terminal.type("\x03")
            terminal.read_until(r"/exit or Ctrl-D ends the chat\r\n> ")
    (rank_1,) = [
        child for child in psutil.Process(terminal.pid).children() if "cli.launch" in " ".join(child.cmdline())
    ]
    rank_1.kill()
    terminal.read_until(r"stopped: rank 1 ended by signal 9 \(SIGKILL\)")
    assert terminal.wait() == 1
