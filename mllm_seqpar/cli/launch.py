"""The ranks of a program: those of a launcher, or those that the program starts itself on this machine.

`launched_ranks` joins them. It needs only RANK and its companion variables, so `torchrun`, `accelerate launch` with any
configuration, and plain `python` all work.

`own_ranks` starts ranks, so that a program receives keyboard input and Ctrl-C: a launcher passes the terminal to none
of its ranks, and Ctrl-C to all of them. The program itself is rank 0. The other ranks are processes in separate
sessions, whose standard input is a pipe from rank 0. The pipe closes when rank 0 ends for any reason, and then they end
as well. Rank 0 watches each of them in a thread, which ends the program with a message if that rank ends first.
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
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator, launched_processes, transfer_communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.comm.nccl_settings import order_launches
from mllm_seqpar.errors import ConfigError, TransferError

from .commands import load_entry
from .options import Parser
from .program_exit import run

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""What a model may be loaded or written in; auto is that of the checkpoint."""

LONGEST_TIMEOUT = 10**9
"""The largest number of seconds of a timeout, about 30 years; torch counts milliseconds in 64 bits."""

GRACE = 3.0
"""Seconds for rank 0 to report its own error after another rank has ended."""

LAST_RANK = 60.0
"""Seconds for the other ranks to end after rank 0. Commands end with a collective, so these ranks have only to exit."""

_MARK = "MLLM_SEQPAR_OWN_RANKS"
"""The environment variable that is set in the ranks that `own_ranks` started."""

_READY = "ready/{}"
"""The key of the store that a rank sets when it has imported its modules."""

_log = get_logger(__name__)


@contextmanager
def launched_ranks(device: str = "auto", timeout: float | None = None) -> Iterator[tuple[Communicator, torch.device]]:
    """Join the processes that the launcher started, and yield (their group, this rank's device).

    An existing process group is used and left in place. A group that is created here is destroyed at the end of the
    block, but not after an exception: destroying it would wait for ranks that may be waiting in a collective.

    Args:
        device: as in `use_cuda`.
        timeout: seconds until a collective fails because a rank did not join; see `collective_timeout`.

    Raises:
        ConfigError: if cuda is requested and this node has too few GPUs, or no rendezvous is configured.
    """
    require_rendezvous()
    order_launches()
    cuda = use_cuda(device)
    rank_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(rank_device)
    creates_group = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if creates_group:
        limit, bound_device = collective_timeout(timeout, cuda), rank_device if cuda else None
        dist.init_process_group("nccl" if cuda else "gloo", timeout=limit, device_id=bound_device)
    yield transfer_communicator(None), rank_device
    if creates_group:
        dist.destroy_process_group()


@contextmanager
def ranks_with_options(read: Callable[[], Any]) -> Iterator[tuple[Any, Communicator, torch.device]]:
    """Join the processes as `launched_ranks` does, and yield (the options of a command, their group, the device).

    Args:
        read: returns the options, a dataclass with the field `device`, and perhaps `timeout`.

    Raises:
        SeqParError: on all ranks, if one of them has invalid options, or the options differ.
    """
    options: Any
    options, problem = attempt(read)
    device, timeout = getattr(options, "device", "auto"), getattr(options, "timeout", None)
    with launched_ranks(device, timeout) as (comm, rank_device):
        agree(comm, "arguments", lambda: options, asdict, error=problem)
        yield options, comm, rank_device


def use_cuda(device: str) -> bool:
    """Return whether this process computes on a GPU, given the device cpu, cuda, or auto.

    auto means cuda if this node has one GPU per process and the launch configuration does not request the CPU.

    Raises:
        ConfigError: if cuda is requested and this node has too few GPUs.
    """
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda" and gpus < processes:
        raise ConfigError(
            f"--device cuda: this node has {gpus} GPUs for {processes} processes; start fewer, or use --device cpu"
        )
    if device != "auto" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        return device == "cuda"
    if 0 < gpus < processes and os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning("computing on the CPU: this node has %d GPUs for %d processes; start fewer", gpus, processes)
    return gpus >= processes


def collective_timeout(seconds: float | None, cuda: bool) -> timedelta:
    """Return the timeout of collectives, by default 600 s on GPUs and 300 s on CPU."""
    return timedelta(seconds=seconds or (600 if cuda else 300))


def require_rendezvous() -> None:
    """Raise ConfigError if a launcher such as srun or mpirun started several processes without a rendezvous address."""
    processes, variable = launched_processes()
    if processes > 1 and variable != "WORLD_SIZE" and not dist.is_initialized():
        raise ConfigError(
            f"{variable}={processes}: {processes} processes were started, and each would process all of the data; "
            "start the script with torchrun or accelerate launch, once on each node"
        )


def started_by_launcher() -> bool:
    """Return whether a launcher, and not `own_ranks`, started several processes."""
    return launched_processes()[0] > 1 and _MARK not in os.environ


@contextmanager
def own_ranks(
    count: int | None, entry: str, argv: Sequence[str], before_exit: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Make this process rank 0 of `count`, and start the others; at the end of the block, wait until they have ended.

    `launched_ranks` then joins them. If a launcher or this function has already started ranks, they are used.

    Args:
        count: None: one for each GPU of this machine, or 1 without any.
        entry: "module:function", called as function(argv) in the other processes.
        before_exit: called before the program ends because another rank has failed.

    Raises:
        ConfigError: `count` is below 1, more than this machine can run, or not the number of processes that a launcher
            has started.
        TransferError: another rank still runs `LAST_RANK` seconds after the end of the block.
    """
    if count is not None and count < 1:
        raise ConfigError(f"--num_processes: {count} is not allowed; give 1 or more")
    if started_by_launcher() and count not in (None, launched_processes()[0]):
        raise ConfigError(
            f"--num_processes {count}: a launcher has started {launched_processes()[0]} processes already; leave "
            "--num_processes out, or start the command without a launcher"
        )
    gpus, processors = torch.cuda.device_count(), os.cpu_count() or 1
    count = count or max(1, gpus)
    if count == 1 or started_by_launcher() or _MARK in os.environ:
        yield
        return
    if count > (most := max(gpus, 2 * processors, 8)):  # eight on any machine, to try things
        raise ConfigError(
            f"--num_processes {count}: this machine has {processors} processors and {gpus} GPUs; give at most {most} "
            "(a launcher starts ranks on several machines)"
        )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rendezvous |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), _MARK: "1"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        rendezvous["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in os.environ:  # more threads than cores would slow down all ranks
        threads = max(1, processors // count)
        rendezvous["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    before, others = dict(os.environ), _OtherRanks(count, [entry, *argv], rendezvous, before_exit)
    try:
        load_entry(entry)  # this rank imports the modules while the others do
        # The imports may take longer than the timeout of a collective. If a rank ends before, its thread ends the
        # program.
        while not all(store.check([_READY.format(rank)]) for rank in range(1, count)):
            time.sleep(0.05)
        os.environ.update(rendezvous, RANK="0", LOCAL_RANK="0")
        yield
        others.wait()
    finally:
        os.environ.clear()
        os.environ.update(before)
        others.close()


class _OtherRanks:
    """The processes of ranks 1 and above, with a thread for each that waits for its end."""

    def __init__(
        self, count: int, argv: Sequence[str], rendezvous: dict[str, str], before_exit: Callable[[], object]
    ) -> None:
        self._before_exit, self._closing = before_exit, threading.Event()
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, *argv]
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, count):
            environment = {**os.environ, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def wait(self) -> None:
        """Wait until all processes have ended; raise TransferError if one still runs after `LAST_RANK` seconds. If one
        has failed, its thread ends the program."""
        deadline = time.monotonic() + LAST_RANK
        for rank, process in enumerate(self._processes, 1):
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise TransferError(f"rank {rank} still ran {LAST_RANK:g} s after rank 0 had ended") from error
            if status:
                time.sleep(2 * GRACE)

    def close(self) -> None:
        """End the processes that still run."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll():  # it ended earlier, which may be the reason why this rank ends
                self._report(rank, process.returncode)
        self._closing.set()
        for process in self._processes:
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
    """Return the exit status of a command, "module:function"; with --num_processes N, of rank 0 of N on this machine.

    The program ends with a message if another rank fails.
    """

    def on_ranks(argv: Sequence[str]) -> int | None:
        parser = Parser(add_help=False)
        parser.add_argument("--num_processes", type=int)
        args, rest = parser.parse_known_args(argv)
        if args.num_processes is None or not {"-h", "--help"}.isdisjoint(rest):
            return load_entry(entry)(rest)
        with own_ranks(args.num_processes, entry, rest):
            return run(load_entry(entry), rest)  # destroys the process group before `own_ranks` waits

    return run(on_ranks, argv)


def main(argv: Sequence[str]) -> NoReturn:
    """Run a rank that `own_ranks` started: `argv` is "module:function" and the arguments of the function."""

    def end_with_rank_0() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=end_with_rank_0, daemon=True).start()
    entry = load_entry(argv[0])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    store.set(_READY.format(os.environ["RANK"]), "")
    run(entry, argv[1:])  # the status of the program is that of rank 0
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
