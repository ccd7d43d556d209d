"""Layer: one process, and one more in a pseudo-terminal. The chat's terminal: Ctrl-C, completion and history."""

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_seqpar.inference.encoding import Interrupted
from mllm_seqpar.inference.job import Job, JobError
from mllm_seqpar.serving.chat import _NAMES, Terminal
from mllm_seqpar.serving.line_editing import completions, history_file

SCRIPT = """
import os
from mllm_seqpar.serving.line_editing import edit_lines

for _ in range(2):  # two chats, one after the other
    if not os.fork():
        keep = edit_lines(["/video"])
        for _ in range(2):
            print("got " + repr(input("> ")), flush=True)
            keep()
        break
    os.wait()
    print("ended", flush=True)
"""
HANG = 120


def test_ctrl_c_drops_a_line_or_stops_an_answer_and_never_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where SIGINT was ignored at the start, and between a line and its answer."""

    def line_and_interrupt(text: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return text

    lines: list[Callable[[], str]] = [lambda: line_and_interrupt("dropped"), lambda: "What is it?"]
    monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0)() if lines else _raise(EOFError()))
    stops = []

    def answer(job: Job, *, interrupted: Callable[[], bool], **_: Any) -> Any:
        assert job.messages[-1]["content"][-1]["text"] == "What is it?" and not interrupted()
        for _again in range(2):
            signal.raise_signal(signal.SIGINT)
        stops.append(interrupted())
        raise JobError(Interrupted())

    sampling = SimpleNamespace(max_new_tokens=3)
    args = SimpleNamespace(model="tiny", system=None, seed=0, sampling=lambda: sampling)
    worker = SimpleNamespace(run=answer, engine=SimpleNamespace(comm=SimpleNamespace(size=1)))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Terminal(args, worker, None).talk()  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert stops == [True] and not lines
    printed = capsys.readouterr().err
    assert "/exit or Ctrl-D ends the chat" in printed and printed.endswith("\nstopped\n")


def _raise(error: BaseException) -> Any:
    raise error


def test_commands_and_paths_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my movies").mkdir()
    (tmp_path / "my movies" / "a[1].mp4").touch()
    (tmp_path / "my notes").touch()
    assert completions("/v", _NAMES) == ["/video"] and "/evidence" in completions("/", _NAMES)
    assert completions("What is", _NAMES) == completions("/nothing a", _NAMES) == []
    start = f"/video {tmp_path}/my"
    assert completions(start, _NAMES) == [f"{start} movies/", f"{start} notes"]
    assert completions(f"{start} movies/a[", _NAMES) == [f"{start} movies/a[1].mp4"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completions("/video ~/my n", _NAMES) == ["/video ~/my notes"]


@pytest.mark.slow
def test_lines_are_kept_for_the_next_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "movie.mp4").touch()

    unread = ""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT])

    def chat(*lines: str) -> str:
        """Type lines into the terminal, each after the prompt; return what it shows until the chat has ended."""
        nonlocal unread
        deadline, left = time.monotonic() + HANG, list(lines)
        while "ended" not in unread and time.monotonic() < deadline:
            if left and unread.count("got ") == len(lines) - len(left) and "> " in unread.rpartition("got ")[2]:
                os.write(terminal, left.pop(0).encode() + b"\n")
            if select.select([terminal], [], [], 1)[0]:
                unread += os.read(terminal, 4096).decode()
        shown, _, unread = unread.partition("ended")  # the next chat may have shown its prompt already
        return shown

    shown = chat("/vi\t mo\t", "first question")
    assert "got '/video movie.mp4'" in shown.replace("mp4 '", "mp4'"), shown
    assert history_file() == tmp_path / "mllm-seqpar" / "chat_history"
    assert history_file().read_text().splitlines()[-1] == "first question"
    assert history_file().stat().st_mode & 0o77 == 0
    shown = chat("\x1b[A", "next question")  # the arrow up
    assert "got 'first question'" in shown, shown
    assert [line.strip() for line in history_file().read_text().splitlines()][1] == "first question"
    os.waitpid(child, 0)
    os.close(terminal)
