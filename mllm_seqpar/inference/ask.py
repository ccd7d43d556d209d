"""`mllm-seqpar ask`: questions about long videos, and data sets of questions.

    mllm-seqpar ask --model DIR --video movie.mp4 --question "Who opens the door?"
    accelerate launch -m mllm_seqpar ask --model DIR --questions questions.jsonl --output answers.jsonl

Any launcher starts several ranks; without one, the program is one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from transformers.utils import logging

from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.cli.program_exit import FAILED, run
from mllm_seqpar.comm.agreement import agree, attempt

from .arguments import parse
from .data_set import answer_data_set
from .run import ask_videos


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 if some questions or videos have no answer; or end the process with a message."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return run(ask, argv)


def ask(argv: Sequence[str]) -> int:
    """Answer the questions of the command line `argv`, and return the exit status. Every rank calls this.

    See `AskArguments`.

    Raises:
        SeqParError: on invalid arguments or files or a video that cannot be read, or if the ranks disagree.
    """
    args, problem = attempt(lambda: parse(argv))
    with launched_ranks(*((args.device, args.timeout) if args else ())) as (comm, device):
        agree(comm, "arguments", lambda: asdict(args) if args else {}, dict, error=problem)
        assert args is not None  # otherwise all ranks have raised
        failures = (ask_videos if args.questions is None else answer_data_set)(args, comm, device)
    return FAILED if failures else 0
