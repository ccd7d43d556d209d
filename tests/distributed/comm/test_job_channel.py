"""Layer: gloo ranks. Ranks wait for jobs longer than a collective of their group may take, and miss a lost rank."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from launch import HANG
from mllm_seqpar.comm import ProcessGroupCommunicator
from mllm_seqpar.errors import TransferError
from mllm_seqpar.serving.jobs import JobChannel
from ranks import ranks

TIMEOUT = 3.0


def channel_of(heartbeat: float, timeout: float = TIMEOUT) -> tuple[ProcessGroupCommunicator, JobChannel]:
    comm = ProcessGroupCommunicator(dist.new_group(timeout=timedelta(seconds=timeout)))
    return comm, JobChannel(comm, heartbeat)


def idle_then_work(rank: int, world: int) -> list[str | None]:
    comm, channel = channel_of(heartbeat=0.2)
    received: list[str | None] = []
    with channel.keeping_alive():
        for job in ("first", "second") if rank == 0 else ():
            time.sleep(TIMEOUT + 1 if job == "first" else 0)
            with channel.send(job):
                comm.gather_ints([rank])
        while rank and None not in received:
            received.append(channel.receive())
            if received[-1] is not None:
                comm.gather_ints([rank])
    return received


@pytest.mark.slow
def test_ranks_wait_longer_than_the_time_limit_of_their_group() -> None:
    assert ranks(2).run(idle_then_work) == [[], ["first", "second", None]]


def wait_for_nobody(rank: int, world: int) -> None:
    _, channel = channel_of(heartbeat=0.05)
    deadline = time.monotonic() + 20 * TIMEOUT
    with channel.keeping_alive():
        while rank == 0 and time.monotonic() < deadline:  # rank 1 does not wait for a job
            channel.require_alive()
            time.sleep(0.02)


@pytest.mark.slow
def test_rank_that_does_not_wait_is_missed() -> None:
    errors = ranks(2).errors(wait_for_nobody)
    assert isinstance(errors[0], TransferError), errors


def end_without_the_other(rank: int, world: int) -> None:
    """Rank 1 does not wait for a job, and so does not notice the end."""
    _, channel = channel_of(heartbeat=1.0, timeout=HANG)
    try:
        with channel.keeping_alive():
            pass
    finally:
        dist.barrier()


@pytest.mark.slow
def test_end_waits_for_no_lost_rank_as_long_as_a_collective() -> None:
    errors = ranks(2).errors(end_without_the_other)
    assert isinstance(errors[0], TransferError) and errors[1] is None, errors
