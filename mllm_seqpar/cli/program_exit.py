"""The exit of a program after an error: one line names the cause, and no other rank waits for this one.

A rank that raises exits immediately and waits for no other rank in a destructor. Its launcher then ends the ranks of
the same node. Launchers of several nodes do not communicate: in the ranks of the other nodes, the next collective fails
because the connection is closed or the timeout has passed, and they end their own launcher. If a launcher is killed,
its ranks end with it. Errors that are found before a collective are raised on all ranks by `comm.agreement` instead.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from mllm_seqpar.comm.agreement import is_reported_by_rank_0
from mllm_seqpar.comm.gloo_exit import release_gloo_at_exit
from mllm_seqpar.errors import (
    AgreementError,
    ConfigError,
    SeqParError,
    TransferError,
    first_line,
    library_fault,
    write_fault,
)

from .commands import BAD_INPUT

FAILED = 1
"""The exit status after an unexpected error, or if a part of the work could not be done."""

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_STOPPED = "stopped:"
_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket", "peer", "nccl")


def run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """Return the exit status of `main(argv)`; an exception ends this process with a message on stderr and a status.

    A rank that fails leaves through `os._exit`, because destructors of process groups and threads that are joined at
    exit may wait for ranks that wait for this one.
    """
    end_with_launcher()
    release_gloo_at_exit()
    status = None
    try:
        status = main(argv)
    except KeyboardInterrupt:
        _exit_now("interrupted", 130)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - some errors of torch are no Exception
        if _rank() and isinstance(error, SeqParError):
            time.sleep(1.0)  # rank 0 may raise the same error, and then ends this rank before it repeats the line
        _exit_now(*describe(error))
    if dist.is_initialized():
        dist.destroy_process_group()
    return status or 0


def end_with_launcher() -> None:
    """Make the kernel end this process when its launcher ends; on Linux, under torch elastic.

    A launcher that is killed with SIGKILL (by the OOM killer, for example) cannot end its ranks, nor those of other
    nodes.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the call
        _exit_now("the launcher ended", FAILED)


def describe(error: BaseException) -> tuple[str, int]:
    """Return (text for stderr, exit status) for an exception.

    Errors of `mllm_seqpar.errors`, files that could not be written, and collectives that broke because another rank
    ended, take one line; any other exception has its traceback. The text is empty if rank 0 reports the same error.
    """
    if isinstance(error, SeqParError):
        reported_elsewhere = isinstance(error, AgreementError) or is_reported_by_rank_0(error)
        return ("" if reported_elsewhere and _rank() else f"error: {error}"), BAD_INPUT
    if _is_lost(error):
        return f"{_STOPPED} another rank ended or does not answer ({first_line(error)})", FAILED
    if (fault := write_fault(error)) is not None:
        name = getattr(error, "filename", None) or "a file"
        return f"error: {name} cannot be written ({fault}); free some space, or give another directory", FAILED
    return "".join(traceback.format_exception(error)).rstrip(), FAILED


def _is_lost(error: BaseException) -> bool:
    """Return whether a collective broke because another rank ended or does not answer."""
    text = str(error).lower()
    lost = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    lost = lost or ("gloo" in text and any(phrase in text for phrase in _LOST))
    return isinstance(error, TransferError) or (isinstance(error, RuntimeError) and lost)


@contextmanager
def library_errors(what: str, begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raise ConfigError, whose message begins with `what`, for an error that transformers raises inside the context.

    Before the work has begun, such an error is about options, or a package or a login that they need.
    """
    try:
        yield
    except Exception as error:
        fault = None if isinstance(error, SeqParError) or _is_lost(error) or begun() else library_fault(error)
        if fault is None or write_fault(error) is not None:
            raise
        raise ConfigError(f"{what}: {fault}") from error


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _exit_now(text: str, status: int) -> None:
    if text:
        prefix = f"[rank {_rank()}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        print(prefix + text, file=sys.stderr, flush=True)  # noqa: T201
    is_cause = bool(text) and not text.startswith(_STOPPED)
    if is_cause and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        # The report of torch's launchers, about 30 lines, ends with the error in this file.
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}))
    sys.stdout.flush()
    sys.stderr.flush()
    if not is_cause:  # the launcher reports the first rank that exits as the root cause and ends the others
        time.sleep(3.0)
    os._exit(status)
