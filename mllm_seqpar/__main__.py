"""The command `mllm-seqpar`, also `python -m mllm_seqpar` and `accelerate launch ... -m mllm_seqpar`.

A command is a function main(argv) that returns its exit status. Its module is imported when the command runs, so that
`mllm-seqpar --help` needs no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mllm_seqpar import __version__
from mllm_seqpar.cli.entry import load_entry
from mllm_seqpar.errors import ConfigError

COMMANDS = {
    "finetune": ("mllm_seqpar.training.finetune:main", "train a model on conversations about videos"),
    "ask": ("mllm_seqpar.inference.ask:main", "answer questions about videos, or a data set of questions"),
    "chat": ("mllm_seqpar.serving.chat:main", "hold a conversation about a video in the terminal"),
    "serve": ("mllm_seqpar.serving.server:main", "answer requests over HTTP, as OpenAI's API does, and show a page"),
    "check-data": ("mllm_seqpar.cli.check_data:main", "open every file that a data set names; report what is broken"),
    "convert": ("mllm_seqpar.cli.convert:main", "write a published checkpoint as a model directory in safetensors"),
    "plan": ("mllm_seqpar.cli.planner:main", "estimate times, bytes and memory of a step, without a GPU"),
    "calibrate": ("mllm_seqpar.cli.calibrate:main", "measure this machine and its links for plan"),
    "doctor": ("mllm_seqpar.cli.doctor:main", "check versions, devices and links, and that results are exact here"),
    "example": (
        "mllm_seqpar.cli.example:main",
        "write a tiny model and a data set of short videos, to try the other commands",
    ),
    "completion": ("mllm_seqpar.cli.completion:main", "print a script that completes commands and options in a shell"),
}
"""For each command: its function, as "module:function", and one line of help."""

OWN_RANKS = ("finetune", "ask", "calibrate")
"""Commands that get the option --num_processes here. chat, serve and doctor have it themselves."""

CHECKED_FIRST = {"finetune": "mllm_seqpar.training.early_check:check_command_line"}
"""Functions that report a wrong option before the command imports torch, because that takes seconds on each rank."""

HELP = """\
usage: mllm-seqpar [--version] [--help] COMMAND [options]

Sequence-parallel training and inference of multimodal models with cross-attention, for long videos.

commands:
{commands}

mllm-seqpar COMMAND --help lists the options of a command. Names of options may be written with underscores or hyphens.
finetune, ask, chat, serve, calibrate and doctor start N ranks on this machine with --num_processes N. A launcher starts
them on several machines: accelerate launch [its options] -m mllm_seqpar COMMAND [options], or torchrun in the same way.

examples:
  mllm-seqpar doctor
  mllm-seqpar check-data train.jsonl
  mllm-seqpar finetune --num_processes 2 --model DIR --data train.jsonl --output_dir runs/first
  mllm-seqpar ask --num_processes 2 --model DIR --video movie.mp4 --question "Who opens the door?"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names, by default that of the command line; return its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items())
        sys.stdout.write(HELP.format(commands=commands))
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"mllm-seqpar {__version__}\n")
        return 0
    command = name.replace("_", "-")
    if command not in COMMANDS:
        sys.stderr.write(f"error: {name!r} is not a command{_nearest(command)}; mllm-seqpar --help lists them\n")
        return 2
    entry = COMMANDS[command][0]
    if command in CHECKED_FIRST and "RANK" not in os.environ:  # ranks of a launcher report together
        try:
            load_entry(CHECKED_FIRST[command])(rest)
        except ConfigError as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
    if command in OWN_RANKS:
        start_ranks_if_asked = load_entry("mllm_seqpar.cli.own_ranks:start_ranks_if_asked")
        return start_ranks_if_asked(entry, rest)
    return load_entry(entry)(rest) or 0


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, 1)
    return f"; did you mean {near[0]}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
