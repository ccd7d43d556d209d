"""Editing of the chat's input lines: a history that later chats share, and completion of commands and paths."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HISTORY_LINES = 1000


def history_file() -> Path:
    """Return the file of the history, in the directory for such files of the XDG specification."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "mllm-seqpar" / "chat_history"


@contextmanager
def line_editing(commands: Sequence[str]) -> Iterator[Callable[[], object]]:
    """Let `input` edit lines, if standard input is a terminal and Python has readline.

    Yields:
        a function to call after each line, which adds it to the history file. A chat may end with any line.

    Args:
        commands: what a line may begin with, such as "/video"; a path may follow.
    """
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield lambda: None
        return
    path = history_file()
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):  # a chat works without its history
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
        readline.write_history_file(path)  # at most HISTORY_LINES
    before = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer_delims("")  # paths may have spaces
    readline.set_completer(lambda text, state: [*completions(text, commands), None][state])
    editline = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if editline else "tab: complete")
    known = readline.get_current_history_length()

    def keep() -> None:
        nonlocal known
        count = readline.get_current_history_length()
        if count > known and hasattr(readline, "append_history_file"):  # editline has none
            with suppress(OSError):
                readline.append_history_file(count - known, path)
        known = count

    try:
        yield keep
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])


def completions(line: str, commands: Sequence[str]) -> list[str]:
    """Return the lines that `line` may become: its command, or the path after its command, is complete."""
    command, space, start = line.partition(" ")
    if not space:
        return [name for name in commands if name.startswith(command)] if command.startswith("/") else []
    if command not in commands:
        return []
    found = sorted(glob.glob(glob.escape(os.path.expanduser(start)) + "*"))
    home = os.path.expanduser("~")
    if start.startswith("~/"):
        found = ["~" + name.removeprefix(home) for name in found]
    return [f"{command} {name}{'/' if os.path.isdir(os.path.expanduser(name)) else ''}" for name in found]
