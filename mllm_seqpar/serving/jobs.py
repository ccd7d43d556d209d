"""A job on all ranks: rank 0 runs it with a user and sends it to the others, which follow.

Ranks that wait for a job are in a collective, which fails when the timeout of the process group has passed, and users
may make them wait for days. A thread on rank 0 therefore sends an empty job every few seconds. It also notices a rank
that has ended or does not answer, and a rank whose connection to rank 0 breaks raises.

An error of one job must not end the program: the engine raises it on all ranks.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.errors import TransferError
from mllm_seqpar.inference.arguments import ServingOptions
from mllm_seqpar.inference.encoding import Progress
from mllm_seqpar.inference.engine import Engine
from mllm_seqpar.inference.generation import Answer, OnText
from mllm_seqpar.inference.job import Job, JobError

HEARTBEAT = 10.0
"""Seconds between the empty jobs that rank 0 sends to waiting ranks."""
_WAIT, _END = "", "end"


class JobChannel:
    """Sends texts from rank 0 to all other ranks. Every rank creates it; rank 0 calls `send`, the others `receive`.

    The `heartbeat`, seconds between the texts to waiting ranks, is less than the timeout of the group.
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


class Worker:
    """The engine of a rank, and its channel. Every rank creates it; rank 0 calls `run`, the others `follow`."""

    def __init__(self, engine: Engine) -> None:
        timeout = engine.options.timeout
        self.engine = engine
        self.channel = JobChannel(engine.comm, HEARTBEAT if timeout is None else min(HEARTBEAT, timeout / 4))

    def run(self, job: Job, **callbacks: Any) -> Answer:
        """Run a job of the user on all ranks, with the callbacks of `_run`; raise JobError if it has no answer."""
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
        conversation, prompt = self.engine.begin(job, progress, interrupted)
        on_start()
        return self.engine.computed(
            lambda: conversation.answer(
                prompt,
                job.sampling,
                stop=job.stop,
                evidence=job.evidence,
                on_text=on_text,
                interrupted=interrupted or (lambda: False),  # a function on all ranks; that of rank 0 decides
            )
        )


@contextmanager
def joined_worker(args: ServingOptions, keep: int) -> Iterator[Worker]:
    """Join the ranks, load the model, and yield this rank's worker; at the end, rank 0 releases the others."""
    with launched_ranks(args.device, args.timeout) as (comm, device):
        engine = Engine(args, comm, device, keep)
        engine.load()
        worker = Worker(engine)
        with worker.channel.keeping_alive():
            yield worker
