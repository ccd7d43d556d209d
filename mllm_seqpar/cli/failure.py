"""How a run ends. When something goes wrong: one line that says what, and no rank left behind.

A rank that raises leaves at once, without waiting for others in a destructor. Its launcher then ends the ranks of the
same node, and those that wait for it in a collective see the connection close, or at the latest the group's time limit.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist

from mllm_seqpar.comm.agreement import is_reported_by_rank_0
from mllm_seqpar.comm.gloo_shutdown import release_gloo_at_exit
from mllm_seqpar.errors import AgreementError, SeqParError, TransferError

BAD_INPUT = 2
FAILED = 1

_STOPPED = "stopped:"
_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket", "peer", "nccl")


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Call `main(argv)`; an exception ends this process with a message on stderr and a status other than 0.

    If `main` returns, the process group is destroyed and the interpreter shuts down as usual, after gloo's threads have
    released their tensors (`comm.gloo_shutdown`). A rank that fails leaves through `os._exit` instead: destructors
    of process groups, and threads that are joined at exit, may wait for ranks that wait for this one.

    Errors of `mllm_seqpar.errors` print as one line; a collective that broke because another rank ended prints as one
    line too; anything else with its traceback.
    """
    release_gloo_at_exit()
    try:
        main(argv)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except Exception as error:  # everything that main can raise must end the process
        _leave(*describe(error))
    if dist.is_initialized():
        dist.destroy_process_group()


def describe(error: Exception) -> tuple[str, int]:
    """(text for stderr, exit status) of an exception."""
    if isinstance(error, AgreementError) or (isinstance(error, SeqParError) and is_reported_by_rank_0(error)):
        return ("" if _rank() else f"error: {error}"), BAD_INPUT  # rank 0 speaks for all
    if isinstance(error, SeqParError):
        return f"error: {error}", BAD_INPUT
    if isinstance(error, TransferError) or (isinstance(error, RuntimeError) and _lost_a_rank(error)):
        return f"{_STOPPED} another rank ended or does not answer ({first_line(error)})", FAILED
    return "".join(traceback.format_exception(error)).rstrip(), FAILED


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its `repr` when it has none."""
    return next(iter(str(error).strip().splitlines()), repr(error))


def _lost_a_rank(error: RuntimeError) -> bool:
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    text = str(error).lower()
    return "gloo" in text and any(word in text for word in _LOST)


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _leave(text: str, status: int) -> None:
    if text:
        where = f"[rank {_rank()}] " if _ranks() > 1 else ""
        print(where + text, file=sys.stderr, flush=True)  # noqa: T201 - the last words of a script
    sys.stdout.flush()
    if not text or text.startswith(_STOPPED):
        # Not the cause: the launcher reports the first rank that leaves as the root cause, and ends all the others.
        time.sleep(3.0)
    _exit(status)  # destructors of process groups may wait for the other ranks


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
