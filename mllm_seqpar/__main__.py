"""The command `mllm-seqpar`, also `python -m mllm_seqpar` and `accelerate launch ... -m mllm_seqpar`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mllm_seqpar import __version__
from mllm_seqpar.cli.commands import BAD_INPUT, COMMANDS, load_entry, run_alone

HELP = """\
usage: mllm-seqpar [--version] [--help] COMMAND [options]

Sequence-parallel training and inference of multimodal models, for videos that do not fit on one GPU.

commands:
{commands}

mllm-seqpar COMMAND --help lists the options of a command. Names of options may be written with underscores or hyphens.
{ranks} and {last} start N ranks on this machine with --num_processes N. A launcher starts
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
        commands = "\n".join(f"  {name:<11} {command.text}" for name, command in COMMANDS.items())
        *ranks, last = [name for name, command in COMMANDS.items() if command.ranks != "none"]
        sys.stdout.write(HELP.format(commands=commands, ranks=", ".join(ranks), last=last))
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"mllm-seqpar {__version__}\n")
        return 0
    command = COMMANDS.get(name.replace("_", "-"))
    if command is None:
        sys.stderr.write(f"error: {name!r} is not a command{_nearest(name)}; mllm-seqpar --help lists them\n")
        return BAD_INPUT
    if command.check is not None and "RANK" not in os.environ:  # ranks of a launcher report together
        if status := run_alone(load_entry(command.check), rest):
            return status
    if command.ranks == "here":
        return int(load_entry("mllm_seqpar.cli.launch:start_ranks_if_asked")(command.entry, rest))
    if command.ranks == "none":
        return run_alone(load_entry(command.entry), rest)
    return int(load_entry("mllm_seqpar.cli.program_exit:run")(load_entry(command.entry), rest))


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name.replace("_", "-"), COMMANDS, 1)
    return f"; did you mean {near[0]}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
