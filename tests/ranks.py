"""A pool of worker processes that form gloo groups and are reused by all test cases.

    def all_reduced(rank, world, x):          # at module level: workers import it by name
        torch.distributed.all_reduce(x)
        return x

    def test_all_reduce_sums_over_ranks():
        assert all(x == 3 for x in ranks(3).run(all_reduced, torch.ones(1)))

Workers live until the session ends. They are forked from a server process that has imported torch, transformers and the
models once, because that takes seconds; `ranks(n)` makes the first n of them one group. Each worker uses one thread and
seeds torch with 0 before each case. After a case that fails, the next case gets a new group. If a case hangs, its
workers write their stacks, are killed, and are started again when next needed. `ranks_worker.py` is the other side.
Results are detached and on the CPU.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from ranks_worker import Failure, load, save, work

MAX_WORKERS = 8
PRELOADED = ["no_collections", "ranks_worker", "family_cases", "accelerate", "torch.distributed.fsdp"]
PRELOADED += ["mllm_seqpar.training.finetune", "transformers.trainer", "matplotlib.figure"]
"""What the server of the workers imports, once for all of them."""
GRACE = 10.0
"""Seconds for the other ranks after one has failed: enough to fail too, less than a collective's time limit."""


class RankError(AssertionError):
    """One or more ranks raised, died or hung. `errors` maps the rank to its exception."""

    def __init__(self, case: str, world: int, failures: dict[int, Failure]) -> None:
        self.errors = {rank: failure.error for rank, failure in failures.items()}
        text = f"{case} failed on rank {', '.join(map(str, failures))} of {world}"
        for rank, (error, details) in failures.items():
            text += f"\n---- rank {rank} of {world}: {type(error).__name__}: {error}\n{details}"
        super().__init__(text)


class RankHang(TimeoutError):
    """A rank did not answer in time."""


class RankDeath(RuntimeError):
    """A worker process ended during a case."""


@dataclass
class Worker:
    """One process of the pool, the pipe to it, and the file with its stacks."""

    process: BaseProcess
    pipe: Connection
    stacks: Path
    group: int = -1  # number of the group it belongs to; -1 for none

    def stack(self) -> str:
        return self.stacks.read_text() if self.stacks.exists() else ""


class Pool:
    """All workers of one test session, indexed by rank."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.folder = tempfile.TemporaryDirectory()
        self.group = 0  # number of the current group, so that no two rendezvous share a file
        self.world = 0  # size of the current group; 0 if the next case must form a new one

    def outcomes(self, world: int, env: Mapping[str, str], case: tuple, timeout: float) -> list[Any]:
        """Run `case`, a tuple (function, args, kwargs), and return the result or `Failure` of each rank."""
        self._ready(world)
        payload = save(case)
        rendezvous = str(Path(self.folder.name) / f"group{self.group}")
        for rank, worker in enumerate(self.workers[:world]):
            join = (rank, world, rendezvous) if worker.group != self.group else None
            worker.group = self.group
            worker.pipe.send((list(sys.path), dict(env), join, payload))
        return self._collect(world, timeout)

    def close(self) -> None:
        for worker in self.workers:
            worker.pipe.close()  # the worker exits when it reads the end of its input
        deadline = time.monotonic() + 2.0
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join()
        self.workers.clear()
        self.folder.cleanup()

    def _ready(self, world: int) -> None:
        dead = [rank for rank, worker in enumerate(self.workers[:world]) if not worker.process.is_alive()]
        new = {rank: self._start(rank) for rank in [*dead, *range(len(self.workers), world)]}
        for rank, worker in new.items():
            worker.pipe.recv()  # it has started; EOFError if it ended, after its message in the output
            self.workers[rank : rank + 1] = [worker]
        if dead or self.world != world:
            self.group += 1
            self.world = world

    def _start(self, rank: int) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        stacks = Path(self.folder.name) / f"stacks{rank}-{time.monotonic_ns()}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=work, args=(theirs, str(stacks)), name=f"rank{rank}")
        # The server needs these before it loads its OpenMP runtime; it finds the preloaded modules on the path.
        here = Path(__file__).parent
        folders = [str(here), str(here.parent / "scripts" / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(folders)):
            process.start()
        theirs.close()
        return Worker(process, ours, stacks)

    def _collect(self, world: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline, limit = time.monotonic() + timeout, f"after {timeout:g} s"
        while len(results) < world:
            waiting = {worker.pipe: rank for rank, worker in enumerate(self.workers[:world]) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                results |= self._kill([*waiting.values()], limit)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                results[rank] = self._receive(rank)
                if isinstance(results[rank], Failure):
                    self.world = 0  # messages may be left in the pipes, so the next case gets a new group
                    deadline = min(deadline, time.monotonic() + GRACE)
                    limit = f"{GRACE:g} s after another rank failed"
        return [results[rank] for rank in range(world)]

    def _receive(self, rank: int) -> Any:
        worker = self.workers[rank]
        try:
            return load(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(5.0)
            code = worker.process.exitcode
            return Failure(RankDeath(f"process of rank {rank} ended with exit code {code}"), worker.stack())

    def _kill(self, hung: list[int], limit: str) -> dict[int, Failure]:
        """Make hung workers write their stacks, and kill them."""
        self.world = 0
        for rank in hung:
            os.kill(self.workers[rank].process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.3)  # faulthandler writes the stacks
        failures = {}
        for rank in hung:
            worker = self.workers[rank]
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
            failures[rank] = Failure(RankHang(f"rank {rank} hung: no result {limit}"), worker.stack())
        return failures


@dataclass(frozen=True)
class Ranks:
    """The first `world` workers as one group, with additional environment variables."""

    world: int
    env: Mapping[str, str]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        """Call `fn(rank, world, *args, **kwargs)` on every rank and return the results by rank.

        Raises:
            RankError: if a rank raised, died or took longer than `timeout` seconds; the message names all such ranks.
        """
        outcomes = _pool.outcomes(self.world, self.env, (fn, args, kwargs), timeout)
        failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
        if failures:
            raise RankError(f"{fn.__module__}.{fn.__qualname__}", self.world, failures)
        return outcomes

    def errors(self, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        """Call `fn` as `run` does and return the exception of each rank, None for a rank that returned."""
        outcomes = _pool.outcomes(self.world, self.env, (fn, args, kwargs), timeout)
        return [outcome.error if isinstance(outcome, Failure) else None for outcome in outcomes]


def ranks(world: int, env: Mapping[str, str] | None = None) -> Ranks:
    """Return a group of `world` processes, 1 to 8; `env` has variables that are set during each case."""
    if not 1 <= world <= MAX_WORKERS:
        raise ValueError(f"ranks({world}): the pool has 1 to {MAX_WORKERS} workers")
    return Ranks(world, env or {})


_pool = Pool()
close_pool = _pool.close
atexit.register(close_pool)
