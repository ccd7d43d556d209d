"""Layer: gloo ranks. Ranks wait for jobs longer than a collective of their group may take, and miss a lost rank."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from mllm_seqpar.comm import ProcessGroupCommunicator
from mllm_seqpar.errors import TransferError
from mllm_seqpar.serving.jobs import LOST, JobChannel
from ranks import ranks

TIMEOUT = 3.0


def idle_then_work(rank: int, world: int) -> list[str | None]:
    comm = ProcessGroupCommunicator(dist.new_group(timeout=timedelta(seconds=TIMEOUT)))
    channel, received = JobChannel(comm, heartbeat=0.2), []
    for job in ("first", "second"):
        if rank == 0:
            end = time.monotonic() + TIMEOUT + 1
            while job == "first" and time.monotonic() < end:
                channel.require_alive()
                time.sleep(0.1)
            channel.send(job)
        else:
            received.append(channel.receive())
        comm.gather_ints([rank])
    if rank == 0:
        channel.close()
    else:
        received.append(channel.receive())
    return received


@pytest.mark.slow
def test_ranks_wait_longer_than_the_time_limit_of_their_group() -> None:
    assert ranks(2).run(idle_then_work) == [[], ["first", "second", None]]


def wait_for_nobody(rank: int, world: int) -> None:
    channel = JobChannel(ProcessGroupCommunicator(), heartbeat=0.05)
    deadline = time.monotonic() + 20 * LOST * channel.heartbeat
    while rank == 0 and time.monotonic() < deadline:  # rank 1 does not wait for a job
        channel.require_alive()
        time.sleep(0.02)


@pytest.mark.slow
def test_rank_without_heartbeat_is_missed() -> None:
    errors = ranks(2).errors(wait_for_nobody)
    assert isinstance(errors[0], TransferError) and "rank 1 has not answered" in str(errors[0])
