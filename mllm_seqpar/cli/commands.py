"""The commands of `mllm-seqpar`, and how they are imported and run on one process: this module needs no torch."""

from __future__ import annotations

import atexit
import gc
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mllm_seqpar.errors import SeqParError

BAD_INPUT = 2
"""The exit status after an invalid option, or an input that cannot be used."""


class Command(NamedTuple):
    """A command, whose function takes the arguments and returns the exit status, or None for 0."""

    entry: str  # "module:function"; the module is imported when the command runs
    text: str  # one line of help
    ranks: str = "none"  # or "here": __main__ reads --num_processes; or "itself": its option, and it calls `own_ranks`
    check: str | None = None  # reports a wrong option before torch is imported, which takes seconds on each rank


COMMANDS = {
    "finetune": Command(
        "mllm_seqpar.training.finetune:main",
        "train a model on conversations about videos",
        ranks="here",
        check="mllm_seqpar.training.early_check:check_command_line",
    ),
    "ask": Command(
        "mllm_seqpar.inference.ask:ask", "answer questions about videos, or a data set of questions", ranks="here"
    ),
    "chat": Command("mllm_seqpar.serving.chat:chat", "hold a conversation about a video in the terminal", "itself"),
    "serve": Command(
        "mllm_seqpar.serving.server:serve", "answer requests over HTTP, as OpenAI's API does, and show a page", "itself"
    ),
    "check-data": Command(
        "mllm_seqpar.cli.check_data:check", "open every file that a data set names; report what is broken"
    ),
    "convert": Command(
        "mllm_seqpar.cli.convert:convert", "write a published checkpoint as a model directory in safetensors"
    ),
    "plan": Command("mllm_seqpar.cli.planner:plan", "estimate times, bytes and memory of a step, without a GPU"),
    "calibrate": Command("mllm_seqpar.cli.calibrate:measure", "measure this machine and its links for plan", "here"),
    "doctor": Command(
        "mllm_seqpar.cli.doctor:doctor", "check versions, devices and links, and that results are exact here", "itself"
    ),
    "example": Command(
        "mllm_seqpar.cli.example:example",
        "write a tiny model and a data set of short videos, to try the other commands",
    ),
    "configs": Command(
        "mllm_seqpar.cli.configs:configs", "list or copy the configurations of accelerate, and the planner's files"
    ),
    "completion": Command(
        "mllm_seqpar.cli.completion:completion", "print a script that completes commands and options in a shell"
    ),
}


def load_entry(entry: str) -> Callable[..., Any]:
    """Return the function that `entry` ("module:function") names.

    The import runs without garbage collection: torch and transformers create a million objects that stay, and
    scanning them repeatedly would take a sixth of the start-up time. Later collections skip them as well (`gc.freeze`),
    except the one at exit if triton is imported: triton 3.9 (torch 2.15) otherwise reports its types as leaked.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(entry)
        return function
    finally:
        gc.freeze()
        atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else None)
        if enabled:
            gc.enable()


def run_alone(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """Return the exit status of `main(argv)`, for a command of one process; report invalid input in one line."""
    try:
        return main(argv) or 0
    except (SeqParError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
