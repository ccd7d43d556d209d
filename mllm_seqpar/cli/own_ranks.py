"""Ranks that a program starts itself on this machine, so that it receives keyboard input and Ctrl-C.

A launcher passes the terminal to none of its ranks, and Ctrl-C to all of them. Here, the program itself is rank 0. The
other ranks are processes in separate sessions, whose standard input is a pipe from rank 0. The pipe closes when rank 0
ends for any reason, and then they end as well. Rank 0 watches each of them in a thread, which ends the program with a
message if that rank ends first.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist

from mllm_seqpar.comm import launched_processes
from mllm_seqpar.errors import ConfigError

from .commands import load_entry
from .options import Parser
from .program_exit import run

_MARK = "MLLM_SEQPAR_OWN_RANKS"
"""The environment variable that is set in the ranks that `own_ranks` started."""

_READY = "ready/{}"

GRACE = 3.0
"""Seconds for rank 0 to report its own error after another rank has ended."""


def started_by_launcher() -> bool:
    """Return whether a launcher, and not `own_ranks`, started several processes."""
    return launched_processes()[0] > 1 and _MARK not in os.environ


@contextmanager
def own_ranks(
    count: int | None,
    entry: str,
    argv: Sequence[str],
    before_exit: Callable[[], object] = lambda: None,
    *,
    wait: bool = False,
) -> Iterator[None]:
    """Make this process rank 0 of `count`, and start the others. They are ended at the end of the block.

    `launched_ranks` then joins them. If a launcher or this function has already started ranks, they are used.

    Args:
        count: 1 or more; None: one for each GPU of this machine, or 1 without any.
        entry: "module:function", called as function(argv) in the other processes.
        argv: the arguments of the command line.
        before_exit: called before the program ends because another rank has failed.
        wait: at the end of the block, wait until the other ranks have ended by themselves.

    Raises:
        ConfigError: `count` is below 1, or not the number of processes that a launcher has started.
    """
    if count is not None and count < 1:
        raise ConfigError(f"--num_processes: {count} is not allowed; give 1 or more")
    if _MARK in os.environ:
        yield
        return
    if started_by_launcher():
        if count not in (None, launched_processes()[0]):
            raise ConfigError(
                f"--num_processes {count}: a launcher has started {launched_processes()[0]} processes already; leave "
                "--num_processes out, or start the command without a launcher"
            )
        yield
        return
    count = count or max(1, torch.cuda.device_count())
    _refuse_too_many(count)
    if count == 1:
        yield
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rendezvous |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), _MARK: "1"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        rendezvous.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    if "OMP_NUM_THREADS" not in os.environ:  # more threads than cores would slow down all ranks
        threads = max(1, (os.cpu_count() or 1) // count)
        rendezvous["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, entry, *argv]
    ranks = _Ranks(before_exit)
    with ExitStack() as stack:
        stack.callback(ranks.close)
        for rank in range(1, count):
            ranks.start(rank, command, {**os.environ, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        load_entry(entry)  # this rank imports the modules while the others do
        _wait_until_ready(store, count)
        before = dict(os.environ)
        os.environ.update(rendezvous, RANK="0", LOCAL_RANK="0")
        stack.callback(_restore_environment, before)
        yield
        if wait:
            ranks.wait()


def _refuse_too_many(count: int) -> None:
    """Raise ConfigError if this machine has neither a GPU nor half a processor for each of `count` ranks.

    Eight are allowed on any machine, to try things.
    """
    gpus, processors = torch.cuda.device_count(), os.cpu_count() or 1
    most = max(gpus, 2 * processors, 8)
    if count > most:
        raise ConfigError(
            f"--num_processes {count}: this machine has {processors} processors and {gpus} GPUs; give at most {most} "
            "(a launcher starts ranks on several machines)"
        )


def _wait_until_ready(store: dist.Store, count: int) -> None:
    """Wait until all ranks have imported their modules, which may take longer than the timeout of a collective.

    If one of them ends before, its thread ends the program.
    """
    for rank in range(1, count):
        while not store.check([_READY.format(rank)]):
            time.sleep(0.05)


def _restore_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


class _Ranks:
    """The processes of ranks 1 and above, with a thread for each that waits for its end."""

    def __init__(self, before_exit: Callable[[], object]) -> None:
        self._before_exit, self._closing = before_exit, threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def wait(self) -> None:
        """Wait until all processes have ended. If one has failed, its thread ends the program."""
        for process in self._processes:
            if process.wait():
                time.sleep(2 * GRACE)

    def close(self) -> None:
        """End all processes, by SIGKILL if they do not end when their input closes."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll():  # it ended earlier, which may be the reason why this rank ends
                self._report(rank, process.returncode)
        self._closing.set()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if status == 0 or self._closing.wait(GRACE):
            return
        self._before_exit()
        self._report(rank, status)
        os._exit(1)  # the other ranks end when their input closes

    def _report(self, rank: int, status: int) -> None:
        ended = f"with exit status {status}" if status >= 0 else f"by signal {-status} ({signal.Signals(-status).name})"
        hint = "; it may have run out of memory" if status == -signal.SIGKILL else ""
        sys.stderr.write(f"\nstopped: rank {rank} ended {ended}{hint}\n")
        sys.stderr.flush()


def start_ranks_if_asked(entry: str, argv: Sequence[str]) -> int:
    """Run a command, with --num_processes N on N ranks of this machine.

    Args:
        entry: "module:function" of the command.
        argv: the arguments, with --num_processes N or without. The command gets the others.

    Returns:
        The exit status of rank 0. The program ends with a message if another rank fails.
    """

    def on_ranks(argv: Sequence[str]) -> int | None:
        parser = Parser(add_help=False)
        parser.add_argument("--num_processes", type=int)
        args, rest = parser.parse_known_args(argv)
        if args.num_processes is None or not {"-h", "--help"}.isdisjoint(rest):
            return load_entry(entry)(rest)
        with own_ranks(args.num_processes, entry, rest, wait=True):
            return run(load_entry(entry), rest)  # destroys the process group before `own_ranks` waits

    return run(on_ranks, argv)


def _end_with_rank_0() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def main(argv: Sequence[str]) -> NoReturn:
    """Run a rank that `own_ranks` started: `argv` is "module:function" and the arguments of the function."""
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    entry = load_entry(argv[0])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    store.set(_READY.format(os.environ["RANK"]), "")
    run(entry, argv[1:])  # the status of the program is that of rank 0
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
