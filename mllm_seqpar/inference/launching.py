"""From what a launcher exported to a process group and a device. Nothing but RANK and its companions is needed, so
`torchrun`, `accelerate launch` with any configuration and a plain `python` all do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm import Communicator, as_communicator
from ..errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


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
    world, local_world = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1)
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < local_world:
        raise ConfigError(
            f"--device cuda: this node has {gpus} GPUs for {local_world} processes; start fewer, or use --device cpu"
        )
    asked_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    on_cuda = device == "cuda" or (device == "auto" and gpus >= local_world and not asked_for_cpu)
    place = torch.device("cuda", _number("LOCAL_RANK", 0)) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(place)
    starts = world > 1 and not dist.is_initialized()
    if starts:
        limit = timedelta(seconds=timeout or (600 if on_cuda else 300))
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=limit, device_id=place if on_cuda else None)
    yield as_communicator(None), place
    if starts:
        dist.destroy_process_group()


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))
