"""The command `mllm-seqpar completion`: a script that completes commands, options and values in a shell (shtab).

The options are those of the parsers of all commands, which are imported for this; the script itself starts no Python.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence

from mllm_seqpar._compat import optional_import, options_of
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner.descriptions import known_files

from .commands import COMMANDS, load_entry
from .options import Parser

SHELLS = ("bash", "zsh", "fish", "powershell")
EXAMPLE = """mllm-seqpar completion bash > ~/.local/share/bash-completion/completions/mllm-seqpar
  mllm-seqpar completion zsh > ~/.zfunc/_mllm-seqpar         # a folder of $fpath, before compinit
  mllm-seqpar completion fish > ~/.config/fish/completions/mllm-seqpar.fish"""

DIRECTORIES = ("model", "language_model", "vision_model", "features", "save_features", "media_root")
"""Options that name a directory, in addition to those whose names end in _dir."""


def completion(argv: Sequence[str]) -> None:
    """Print the script for the shell that `argv` names."""
    parser = Parser(
        prog="mllm-seqpar completion",
        description="Print a script that completes commands, options and values; store it where the shell looks.",
        example=EXAMPLE,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    shell = parser.parse_args(argv).shell
    shtab = optional_import("shtab", extra="completion", needed_for="mllm-seqpar completion")
    program = argparse.ArgumentParser(prog="mllm-seqpar")
    program.add_argument("--version", action="version")
    commands = program.add_subparsers()
    for name, command in COMMANDS.items():
        options = command_parser(command.entry)
        for action in options._actions:
            action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
            if action.nargs == 0 or action.type in (int, float):
                continue  # nothing to complete
            if isinstance(action.metavar, str) and action.metavar.startswith("{"):  # the dataclass checks the value
                action.choices = action.metavar[1:-1].split(",")
            elif action.dest == "cluster":
                action.choices = known_files("cluster").split(", ")
            elif action.choices is None:
                is_directory = action.dest in DIRECTORIES or action.dest.endswith("_dir")
                action.complete = shtab.DIRECTORY if is_directory else shtab.FILE  # type: ignore[attr-defined]
        commands.add_parser(name, help=command.text, parents=[options], add_help=False)
    sys.stdout.write(shtab.complete(program, shell=shell))


def command_parser(entry: str, show: str = "--help") -> argparse.ArgumentParser:
    """Return the parser of a command, with all its options; one without any if its module cannot be imported."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            load_entry(entry)([show])
    except (ImportError, ConfigError):
        pass
    except SystemExit as shown:  # see `Parser.exit`
        parser: argparse.ArgumentParser = shown.parser  # type: ignore[attr-defined]
        everything = "--help_all"
        return command_parser(entry, everything) if everything != show and everything in options_of(parser) else parser
    return argparse.ArgumentParser(add_help=False)
