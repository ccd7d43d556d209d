"""A job on all ranks: rank 0 runs it with a user and sends it to the others, which follow.

A rank that waits in a collective fails when the timeout of the process group has passed, and users may make the ranks
wait for days. Ranks therefore poll a store on rank 0 for a job, and increment a counter in it as their heartbeat. A
rank whose connection to rank 0 breaks raises immediately. Rank 0 raises if a rank has missed `LOST` heartbeats.

An error of one job must not end the program, and afterwards all ranks must keep the same conversations. All ranks
therefore agree on the outcome of `Engine.prepare`, and on an error that `Conversation.answer` raises before its first
forward pass (an option that `generate` refuses, for example). An error within a pass ends the program if there are
other ranks, because they wait for this one in a collective.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.errors import DivergedError, TransferError
from mllm_seqpar.inference.arguments import ServingOptions
from mllm_seqpar.inference.engine import Engine, Job
from mllm_seqpar.inference.generation import Answer, OnText

HEARTBEAT = 10.0
"""Seconds between the heartbeats of a waiting rank."""
POLL = 0.02
"""Seconds between two polls of the store."""
LOST = 6
_END, _CLOSED = "", "closed"


class JobChannel:
    """Sends texts from rank 0 to all other ranks. Every rank creates it; rank 0 calls `send`, the others `receive`.

    Args:
        comm: the ranks.
        heartbeat: seconds between heartbeats.
    """

    def __init__(self, comm: Communicator, heartbeat: float = HEARTBEAT) -> None:
        self._comm, self.heartbeat, self._number = comm, heartbeat, 0
        self._beats: dict[int, tuple[int, float]] = {}
        if comm.size == 1:
            return
        host, limit = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=300)
        if comm.rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        port = int(comm.gather_texts(str(self._store.port) if comm.rank == 0 else "")[0])
        if comm.rank:
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)

    def send(self, job: str) -> None:
        """Send a job, which is not empty, to all other ranks."""
        if self._comm.size == 1:
            return
        self._store.set(f"job/{self._number}", job)
        self._store.delete_key(f"job/{self._number - 2}")  # every rank has taken part in a later job
        self._number += 1
        self._beats.clear()

    def close(self) -> None:
        """Make `receive` return None on all other ranks, and wait until they have read it, but not for a lost rank."""
        self.send(_END)
        deadline = time.monotonic() + self.heartbeat
        while self._comm.size > 1 and self._store.add(_CLOSED, 0) < self._comm.size - 1:
            if time.monotonic() > deadline:
                return
            time.sleep(POLL)

    def receive(self) -> str | None:
        """Wait for the next job without a time limit. Return None after `close`.

        Raises:
            TransferError: rank 0 has ended.
        """
        key, beat = f"job/{self._number}", time.monotonic()
        try:
            while not self._store.check([key]):  # a wait with a timeout would log warnings
                time.sleep(POLL)
                if time.monotonic() - beat > self.heartbeat:
                    beat = time.monotonic()
                    self._store.add(f"alive/{self._comm.rank}", 1)
            self._number += 1
            job = self._store.get(key).decode()
            if job == _END:
                self._store.add(_CLOSED, 1)
            return job or None
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise TransferError(f"rank 0 does not answer ({error})") from error

    def require_alive(self) -> None:
        """Raise TransferError if a waiting rank has had no heartbeat for a while. Rank 0 calls this between jobs."""
        now = time.monotonic()
        for rank in range(1, self._comm.size):
            count = self._store.add(f"alive/{rank}", 0)
            last, since = self._beats.get(rank, (-1, now))
            self._beats[rank] = (count, since if count == last else now)
            if now - self._beats[rank][1] > LOST * self.heartbeat:
                raise TransferError(f"rank {rank} has not answered for {now - since:.0f} s while it waited for a job")


class Outcome(IntEnum):
    """The outcome of a job on a rank. The outcome of the job as a whole is the largest of all ranks."""

    POSSIBLE = 0
    REFUSED = 1
    """The job cannot be answered: a damaged video, a prompt that is too long."""
    FAILED = 2
    """An unexpected error."""
    OUT_OF_MEMORY = 3

    @classmethod
    def of(cls, error: Exception | None) -> Outcome:
        if isinstance(error, torch.OutOfMemoryError):
            return cls.OUT_OF_MEMORY
        if error is None or isinstance(error, ValueError):  # SeqParError, and what transformers raises for options
            return cls.POSSIBLE if error is None else cls.REFUSED
        return cls.FAILED


_FATAL = (TransferError, DivergedError, dist.DistError, torch.AcceleratorError)
"""Errors after which no job can be answered: of transfers between ranks, and of the device."""


class Impossible(Exception):
    """A job that cannot be answered; the next one can follow.

    Attributes:
        cause: an error of any rank.
        outcome: of the job.
    """

    def __init__(self, cause: Exception, outcome: Outcome = Outcome.REFUSED) -> None:
        self.cause, self.outcome = cause, outcome
        memory = outcome is Outcome.OUT_OF_MEMORY
        super().__init__("out of memory: use fewer frames, or start more ranks" if memory else str(cause))


class Worker:
    """The engine of a rank, and its channel. Every rank creates it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.channel = engine, JobChannel(engine.comm)
        self._computing = False  # whether a pass has begun, so that other ranks may wait for this one
        engine.model.register_forward_pre_hook(lambda *_: setattr(self, "_computing", True))

    def run(
        self,
        job: Job,
        *,
        on_start: Callable[[], object] = lambda: None,
        progress: Callable[[int, int], object] | None = None,
        on_text: OnText | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Answer:
        """Run a job, which rank 0 first sends to the other ranks.

        Raises:
            Impossible: the job cannot be answered.
        """
        if self.engine.comm.rank == 0:
            self.channel.send(job.to_json())
        prepared, error = attempt(lambda: self.engine.prepare(job, progress, interrupted))
        self._require_success(error)
        assert prepared is not None
        on_start()
        conversation, text = prepared
        options: dict[str, Any] = {"stop": job.stop, "on_text": on_text, "evidence": job.evidence}
        options["interrupted"] = interrupted or (lambda: False)  # rank 0 alone has one
        self._computing = False
        try:
            return conversation.answer(text, job.sampling, **options)
        except Exception as raised:
            if self._computing and self.engine.comm.size > 1:
                raise
            error = raised
        del prepared, conversation
        self._require_success(error)
        raise AssertionError("an answer without a result or an error")

    def _require_success(self, error: Exception | None) -> None:
        """Raise Impossible on all ranks if any of them has an error; the features of the job are freed."""
        if isinstance(error, _FATAL):
            raise error
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # they refer to the features of this job, and to the error
        comm, mine = self.engine.comm, Outcome.of(error)
        _, rows = agree(comm, "answering", lambda: mine, lambda _: {}, numbers=lambda found: [found])
        outcome = Outcome(max(row[0] for row in rows))
        if outcome and any(row[0] != Outcome.REFUSED for row in rows):  # ranks may have kept different conversations
            self.engine.forget()
        if outcome:
            try:
                agree(comm, "answering", error=error)
            except Exception as cause:
                raise Impossible(cause, outcome) from cause

    def follow(self) -> None:
        """Run the jobs of rank 0 until it closes the channel; the other ranks call this."""
        while (text := self.channel.receive()) is not None:
            try:
                self.run(Job.from_json(text))
            except Impossible:
                pass  # rank 0 reports it to its user


@contextmanager
def joined_worker(args: ServingOptions, keep: int) -> Iterator[Worker]:
    """Join the ranks, load the model, and yield this rank's worker; at the end, rank 0 releases the others."""
    with launched_ranks(args.device, args.timeout) as (comm, device):
        engine = Engine(args, comm, device, keep)
        engine.load()
        worker = Worker(engine)
        yield worker
        if comm.rank == 0:
            worker.channel.close()
