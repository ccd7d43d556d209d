"""A pool of real worker processes over gloo, kept between test cases.

    from ranks import ranks

    def adds_up(rank, world, x):              # at module level: workers import it by name
        x = x + rank
        torch.distributed.all_reduce(x)
        return x

    def test_adds_up():
        assert all(x == 3 for x in ranks(3).run(adds_up, torch.zeros(1)))

Starting a process that imports torch takes seconds, a group among running ones milliseconds. So workers live until
the session ends, and `ranks(n)` makes the first n of them one group of n. Each runs one thread and seeds torch with 0
before each case. After a case that fails, the next one gets a new group; a case that hangs costs its workers: they say
where they stand, are killed, and are started again when next needed. What a worker does is in `ranks_worker.py`.

Arguments and results travel as bytes written by torch.save: no shared memory, no open files, and what comes back is
detached and on the CPU.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from ranks_worker import Failure, load, save, work

MAX_WORKERS = 8
GRACE = 10.0
"""Seconds that the other ranks get once one has failed: enough to fail too, not to sit out a collective's timeout."""
START_LIMIT = 180.0
"""Seconds for a worker to start and import torch, which is not part of any case's own limit."""


class RankError(AssertionError):
    """One or more ranks raised, died or hung. `errors` maps the rank to its exception."""

    def __init__(self, case: str, world: int, failures: dict[int, Failure]) -> None:
        self.errors = {rank: failure.error for rank, failure in failures.items()}
        ranks_failed = ", ".join(map(str, failures))
        details = "\n".join(
            f"---- rank {rank} of {world}: {failure.summary}\n{failure.details}" for rank, failure in failures.items()
        )
        super().__init__(f"{case} failed on rank {ranks_failed} of {world}\n{details}")


class RankHang(TimeoutError):
    """A rank that did not answer in time; the message holds the stack of each of its threads."""


class RankDeath(RuntimeError):
    """A worker process that ended in the middle of a case."""


@dataclass
class Worker:
    """One process of the pool and the two ends that the pool holds of it."""

    process: SpawnProcess
    pipe: Connection
    stacks: Path
    group: int = -1  # number of the group it belongs to; -1 for none


@dataclass
class Pool:
    """All workers of one test session, indexed by rank."""

    workers: list[Worker] = field(default_factory=list)
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    group: int = 0  # counts groups, so that no two rendezvous share a file
    world: int = 0  # size of the current group; 0 when the next case must make a new one

    def outcomes(self, world: int, fn: Callable[..., Any], args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        """The result or the `Failure` of each rank."""
        self._ready(world)
        payload = save((fn, args, kwargs))
        rendezvous = str(Path(self.folder.name) / f"group{self.group}")
        for rank, worker in enumerate(self.workers[:world]):
            join = (rank, world, rendezvous) if worker.group != self.group else None
            worker.group = self.group
            worker.pipe.send((list(sys.path), join, payload))
        return self._collect(world, timeout)

    def close(self) -> None:
        """Ends all workers; the pool may be used again."""
        for worker in self.workers:
            worker.pipe.close()  # the worker reads the end of its input and leaves
        deadline = time.monotonic() + 2.0
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self.workers.clear()
        self.world = 0
        self.folder.cleanup()
        self.folder = tempfile.TemporaryDirectory()

    def _ready(self, world: int) -> None:
        dead = [rank for rank, worker in enumerate(self.workers[:world]) if not worker.process.is_alive()]
        new = {rank: self._start(rank) for rank in [*dead, *range(len(self.workers), world)]}
        for rank, worker in new.items():
            if not worker.pipe.poll(START_LIMIT):
                raise RankHang(f"worker {rank} did not start within {START_LIMIT:g} s")
            try:
                worker.pipe.recv()
            except EOFError:
                raise RankDeath(f"worker {rank} ended while starting; its own message is in the output") from None
            self.workers[rank : rank + 1] = [worker]
        if dead:
            self.world = 0
        if self.world != world:
            self.group += 1
            self.world = world

    def _start(self, rank: int) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        stacks = Path(self.folder.name) / f"stacks{rank}-{time.monotonic_ns()}"
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=work, args=(theirs, str(stacks)), name=f"rank{rank}")
        with _quiet_environment():
            process.start()
        theirs.close()
        return Worker(process, ours, stacks)

    def _collect(self, world: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < world:
            waiting = {worker.pipe: rank for rank, worker in enumerate(self.workers[:world]) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill(waiting.values(), timeout, results)
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                results[rank] = self._receive(rank)
                if isinstance(results[rank], Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        if any(isinstance(result, Failure) for result in results.values()):
            self.world = 0  # messages may be left over: the next case gets a new group
        return [results[rank] for rank in range(world)]

    def _receive(self, rank: int) -> Any:
        worker = self.workers[rank]
        try:
            return load(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(5.0)
            code = worker.process.exitcode
            return Failure(RankDeath(f"process of rank {rank} ended with exit code {code}"), _read(worker.stacks))

    def _kill(self, hung: Any, timeout: float, results: dict[int, Any]) -> None:
        """Asks hung workers where they stand, then kills them; results gets a `Failure` for each."""
        hung = list(hung)
        others = any(isinstance(result, Failure) for result in results.values())
        told = f"{GRACE:g} s after another rank failed" if others else f"after {timeout:g} s"
        for rank in hung:
            os.kill(self.workers[rank].process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.3)  # faulthandler writes the stacks
        for rank in hung:
            worker = self.workers[rank]
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
            results[rank] = Failure(RankHang(f"rank {rank} hung: no result {told}"), _read(worker.stacks))


class _quiet_environment:
    """One thread per rank, decided before the child loads its OpenMP runtime."""

    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.threads}
        os.environ.update(self.threads)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class Ranks:
    """The first `world` workers as one group."""

    world: int

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        """Calls `fn(rank, world, *args, **kwargs)` on every rank and returns the results by rank.

        Raises:
            RankError: a rank raised, died or took longer than `timeout` seconds; all such ranks are in the message.
        """
        outcomes = _pool.outcomes(self.world, fn, args, kwargs, timeout)
        failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
        if failures:
            raise RankError(f"{fn.__module__}.{fn.__qualname__}", self.world, failures)
        return outcomes

    def errors(self, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        """Like `run`, for cases that are to fail: the exception of each rank, None where it returned."""
        outcomes = _pool.outcomes(self.world, fn, args, kwargs, timeout)
        return [outcome.error if isinstance(outcome, Failure) else None for outcome in outcomes]


def ranks(world: int) -> Ranks:
    """A group of `world` real processes, 1 to 8."""
    if not 1 <= world <= MAX_WORKERS:
        raise ValueError(f"ranks({world}): the pool has 1 to {MAX_WORKERS} workers")
    return Ranks(world)


_pool = Pool()
atexit.register(_pool.close)


def close_pool() -> None:
    """Ends all workers. The next `ranks(n)` starts new ones."""
    _pool.close()
