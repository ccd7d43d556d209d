"""Line editing of `input` in a terminal: a history of earlier chats, and completion. This module needs no torch."""

from __future__ import annotations

import glob
import os
import sys
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

HISTORY_LINES = 1000


def terminal_restorer() -> Callable[[], None]:
    """Return a function that restores the terminal's settings, which `input` changes; call it before `os._exit`."""
    try:
        settings = termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):  # not a terminal
        return lambda: None
    return lambda: termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, settings)


def history_file() -> Path:
    """Return the file of the history, in the directory for such files of the XDG specification."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "mllm-seqpar" / "chat_history"


def edit_lines(commands: Sequence[str]) -> Callable[[], object]:
    """Let `input` edit lines with a history, if standard input is a terminal and Python has readline.

    Args:
        commands: the words that Tab completes at the beginning of a line.

    Returns:
        a function to call after each line, which adds it to the history file. A chat may end with any line.
    """
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        return lambda: None
    path = history_file()
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):  # a chat works without its history
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
        readline.write_history_file(path)  # at most HISTORY_LINES
    readline.set_completer_delims("")  # paths may have spaces
    readline.set_completer(lambda text, state: [*completions(text, commands), None][state])
    editline = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if editline else "tab: complete")
    known = readline.get_current_history_length()

    def keep() -> None:
        nonlocal known
        added, known = readline.get_current_history_length() - known, readline.get_current_history_length()
        with suppress(OSError, AttributeError):  # editline cannot append
            readline.append_history_file(added, path)

    return keep


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
