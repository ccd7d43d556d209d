"""A job on all ranks: rank 0 runs it with a user and sends it to the others, which follow.

Ranks that wait for a job are in a collective, which fails when the timeout of the process group has passed, and users
may make them wait for days. A thread on rank 0 therefore sends an empty job every few seconds. It also notices a rank
that has ended or does not answer, and a rank whose connection to rank 0 breaks raises.

An error of one job must not end the program, and afterwards all ranks must keep the same conversations. All ranks
therefore agree on the outcome of `Engine.prepare`, and on an error that `Conversation.answer` raises before its first
forward pass (an option that `generate` refuses, for example). An error within a pass ends the program if there are
other ranks, because they wait for this one in a collective. Logits that are not finite are an error of the job, because
they are found after the answer, on all ranks together.
"""

from __future__ import annotations

import functools
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.errors import DivergedError, NonFiniteLogitsError, TransferError
from mllm_seqpar.inference.arguments import ServingOptions
from mllm_seqpar.inference.encoding import Progress
from mllm_seqpar.inference.engine import Engine, Job
from mllm_seqpar.inference.generation import Answer, OnText

HEARTBEAT = 10.0
"""Seconds between the empty jobs that rank 0 sends to waiting ranks."""
_WAIT, _END = "", "end"


class JobChannel:
    """Sends texts from rank 0 to all other ranks. Every rank creates it; rank 0 calls `send`, the others `receive`.

    Args:
        comm: the ranks.
        heartbeat: seconds between the texts to waiting ranks; less than the timeout of the group.
    """

    def __init__(self, comm: Communicator, heartbeat: float = HEARTBEAT) -> None:
        self._comm, self.heartbeat, self._turn = comm, heartbeat, threading.Lock()
        self._last: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lost: Exception | None = None

    @contextmanager
    def keeping_alive(self) -> Iterator[None]:
        """On rank 0, keep waiting ranks alive inside the block, and release them at its end if it raises nothing.

        Raises:
            TransferError: a rank has ended, or does not answer within `heartbeat` seconds after the end.
        """
        if self._comm.rank:
            yield
            return
        beats = threading.Thread(target=self._beat, daemon=True)
        beats.start()
        try:
            yield
        except BaseException:
            self._last.put(None)
            raise
        self._last.put(_END)
        beats.join(self.heartbeat)
        if beats.is_alive():
            raise TransferError(f"a rank has not answered for {self.heartbeat:g} s at the end")
        self.require_alive()

    def _beat(self) -> None:
        """Send empty jobs, and the last text, unless it is None."""
        text: str | None = _WAIT
        while text == _WAIT and self._lost is None:
            with suppress(queue.Empty):
                text = self._last.get(timeout=self.heartbeat)
            if text is not None:
                with self._turn:
                    _, self._lost = attempt(functools.partial(self._comm.gather_texts, text))

    @contextmanager
    def send(self, job: str) -> Iterator[None]:
        """Send a job to all other ranks; inside the block, all ranks run it."""
        with self._turn:
            self.require_alive()
            self._comm.gather_texts(job)
            yield

    def receive(self) -> str | None:
        """Wait for the next job without a time limit, and return it; None at the end.

        Raises:
            TransferError: rank 0 has ended.
        """
        while (job := self._comm.gather_texts(_WAIT)[0]) == _WAIT:
            pass
        return None if job == _END else job

    def require_alive(self) -> None:
        """Raise TransferError if a waiting rank has ended or does not answer."""
        if self._lost is not None:
            raise self._lost


class Outcome(IntEnum):
    """The outcome of a job on a rank. The outcome of the job as a whole is the largest of all ranks."""

    PREPARED = 0
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
            return cls.PREPARED if error is None else cls.REFUSED
        return cls.FAILED


_FATAL = (TransferError, DivergedError, dist.DistError, torch.AcceleratorError)
"""Errors after which no job can be answered: of transfers between ranks, and of the device."""


class JobError(Exception):
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
    """The engine of a rank, and its channel. Every rank creates it; rank 0 calls `run`, the others `follow`."""

    def __init__(self, engine: Engine) -> None:
        timeout = engine.options.timeout
        self.engine = engine
        self.channel = JobChannel(engine.comm, HEARTBEAT if timeout is None else min(HEARTBEAT, timeout / 4))
        self._computing = False  # whether a pass has begun, so that other ranks may wait for this one
        engine.model.register_forward_pre_hook(lambda *_: setattr(self, "_computing", True))

    def run(self, job: Job, **callbacks: Any) -> Answer:
        """Run a job on all ranks.

        Args:
            job: of the user.
            **callbacks: `on_start` and `progress` of the encoding, `on_text`, and `interrupted`, which ends the answer
                when it returns True.

        Raises:
            JobError: the job cannot be answered.
        """
        with self.channel.send(job.to_json()):
            return self._run(job, **callbacks)

    def follow(self) -> None:
        """Run the jobs of rank 0 until it ends."""
        while self.follow_one():
            pass

    def follow_one(self) -> Answer | JobError | None:
        """Run the next job of rank 0; return what its `run` returns or raises, or None at the end."""
        text = self.channel.receive()
        try:
            return None if text is None else self._run(Job.from_json(text))
        except JobError as error:  # rank 0 reports it to its user
            return error

    def _run(
        self,
        job: Job,
        *,
        on_start: Callable[[], object] = lambda: None,
        progress: Progress | None = None,
        on_text: OnText | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Answer:
        prepared, error = attempt(lambda: self.engine.prepare(job, progress, interrupted))
        self._require_success(error)
        assert prepared is not None
        on_start()
        conversation, text = prepared
        options: dict[str, Any] = {"stop": job.stop, "on_text": on_text, "evidence": job.evidence}
        self._computing = False
        try:
            return conversation.answer(text, job.sampling, interrupted=interrupted or (lambda: False), **options)
        except Exception as raised:
            on_all_ranks = isinstance(raised, NonFiniteLogitsError)
            if self._computing and self.engine.comm.size > 1 and not on_all_ranks:
                raise
            error = raised
        del prepared, conversation
        self._require_success(error)
        raise AssertionError("an answer without a result or an error")

    def _require_success(self, error: Exception | None) -> None:
        """Raise JobError on all ranks if any of them has an error; the features of the job are freed."""
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
                raise JobError(cause, outcome) from cause


@contextmanager
def joined_worker(args: ServingOptions, keep: int) -> Iterator[Worker]:
    """Join the ranks, load the model, and yield this rank's worker; at the end, rank 0 releases the others."""
    with launched_ranks(args.device, args.timeout) as (comm, device):
        engine = Engine(args, comm, device, keep)
        engine.load()
        worker = Worker(engine)
        with worker.channel.keeping_alive():
            yield worker
