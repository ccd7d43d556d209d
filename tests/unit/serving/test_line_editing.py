"""Layer: one process, and one more in a pseudo-terminal. Completion and history of the chat's input lines."""

import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest

from mllm_seqpar.serving.chat import _NAMES
from mllm_seqpar.serving.line_editing import completions, history_file

SCRIPT = """
from mllm_seqpar.serving.line_editing import line_editing
with line_editing(("/video", "/reset")) as keep:
    for _ in range(2):
        print("got " + repr(input("> ")), flush=True)
        keep()
"""
HANG = 120


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

    def chat(*lines: str) -> str:
        """Type lines into a terminal, each after the prompt; return what it shows."""
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(tmp_path)
            os.execv(sys.executable, [sys.executable, "-c", SCRIPT])
        shown, deadline, left = "", time.monotonic() + HANG, list(lines)
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                shown += os.read(terminal, 4096).decode()
            except OSError:  # the end
                break
            if left and shown.count("got ") == len(lines) - len(left) and "> " in shown.rpartition("got ")[2]:
                os.write(terminal, left.pop(0).encode() + b"\n")
        os.waitpid(child, 0)
        os.close(terminal)
        return shown

    shown = chat("/vi\t mo\t", "first question")
    assert "got '/video movie.mp4'" in shown.replace("mp4 '", "mp4'"), shown
    assert history_file() == tmp_path / "mllm-seqpar" / "chat_history"
    assert history_file().read_text().splitlines()[-1] == "first question"
    assert history_file().stat().st_mode & 0o77 == 0
    shown = chat("\x1b[A", "next question")  # the arrow up
    assert "got 'first question'" in shown, shown
    assert [line.strip() for line in history_file().read_text().splitlines()][1] == "first question"
