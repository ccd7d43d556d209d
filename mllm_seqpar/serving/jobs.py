"""A job on all ranks: rank 0 runs it with a user, the others follow."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mllm_seqpar.cli.job_channel import JobChannel
from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.errors import SeqParError
from mllm_seqpar.inference.conversation import OnText, Reply

from .arguments import ServingOptions
from .engine import Engine, Job


class Impossible(Exception):
    """A job that cannot be answered; the next one can follow. `cause` is an error of any rank."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        memory = isinstance(cause, torch.OutOfMemoryError)
        super().__init__("out of memory: take fewer frames, or start more ranks" if memory else str(cause))


class Worker:
    """The engine and the channel of a rank."""

    def __init__(self, engine: Engine, channel: JobChannel) -> None:
        self.engine, self.channel = engine, channel

    def run(
        self,
        job: Job,
        *,
        on_start: Callable[[], object] = lambda: None,
        progress: Callable[[int, int], object] | None = None,
        on_text: OnText | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Reply:
        """Run a job, which rank 0 first sends to the other ranks.

        Raises:
            Impossible: the job cannot be answered.
        """
        if self.engine.comm.rank == 0:
            self.channel.send(job.to_json())
        try:
            prepared = self.engine.prepare(job, progress, interrupted)
        except (SeqParError, torch.OutOfMemoryError) as error:
            traceback.clear_frames(error.__traceback__)  # they refer to the features of this job, and to the error
            if isinstance(error, torch.OutOfMemoryError):
                self.engine.forget()
            raise Impossible(error) from error
        on_start()
        try:
            return self.engine.answer(job, prepared, on_text, interrupted)
        except torch.OutOfMemoryError as error:
            if self.engine.comm.size > 1:  # the other ranks wait for this one in a collective
                raise
            traceback.clear_frames(error.__traceback__)
            del prepared
            self.engine.forget()
            raise Impossible(error) from error

    def follow(self) -> None:
        """Run the jobs of rank 0 until it closes the channel; the other ranks call this."""
        while (text := self.channel.receive()) is not None:
            try:
                self.run(Job.from_json(text))
            except Impossible:
                pass  # rank 0 tells its user


@contextmanager
def joined_worker(args: ServingOptions, keep: int) -> Iterator[Worker]:
    """Join the ranks, load the model, and yield this rank's worker; at the end, rank 0 releases the others."""
    with launched_ranks(args.device, args.timeout) as (comm, device):
        worker = Worker(Engine(args, comm, device, keep), JobChannel(comm))
        yield worker
        if comm.rank == 0:
            worker.channel.close()
