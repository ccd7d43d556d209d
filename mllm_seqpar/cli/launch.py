"""From what a launcher exported to a process group and a device. Nothing but RANK and its companions is needed, so
`torchrun`, `accelerate launch` with any configuration and a plain `python` all do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mllm_seqpar.comm import Communicator, as_communicator

from .devices import on_cuda, require_rendezvous, time_limit


@contextmanager
def launched_ranks(device: str = "auto", timeout: float | None = None) -> Iterator[tuple[Communicator, torch.device]]:
    """Joins the processes that the launcher started: yields (their group, this rank's device).

    A process group that exists already is used as it is. One that is made here ends with the block, unless an exception
    ends that: other ranks may be waiting in a collective, and leaving the group properly would mean to wait for them.

    Args:
        device: cpu, cuda, or auto: cuda when this node has a GPU for each of its processes and the launch
            configuration does not ask for the CPU.
        timeout: seconds after which a rank that does not answer is given up; None for 600 on GPUs and 300 on CPU.

    Raises:
        ConfigError: cuda is asked for, and this node has too few GPUs.
    """
    require_rendezvous()
    cuda = on_cuda(device)
    place = torch.device("cuda", _number("LOCAL_RANK", 0)) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    starts = _number("WORLD_SIZE", 1) > 1 and not dist.is_initialized()
    if starts:
        limit = time_limit(timeout, cuda)
        dist.init_process_group("nccl" if cuda else "gloo", timeout=limit, device_id=place if cuda else None)
    yield as_communicator(None), place
    if starts:
        dist.destroy_process_group()


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))
