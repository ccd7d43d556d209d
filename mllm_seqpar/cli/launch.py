"""The device, the process group and the time limit of a program, from its launcher's environment variables.

Only RANK and its companion variables are needed, so `torchrun`, `accelerate launch` with any configuration, and plain
`python` all work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator, launched_processes, transfer_communicator
from mllm_seqpar.comm.backends import order_launches
from mllm_seqpar.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""What a model may be loaded or written in; auto is that of the checkpoint."""

_log = get_logger(__name__)


@contextmanager
def launched_ranks(device: str = "auto", timeout: float | None = None) -> Iterator[tuple[Communicator, torch.device]]:
    """Join the processes that the launcher started, and yield (their group, this rank's device).

    In addition to NCCL, the group has a backend for the CPU, over which ranks agree without waiting for the device. An
    existing process group is used and left in place. A group that is created here is destroyed at the end of the block,
    but not after an exception: destroying it would wait for ranks that may be waiting in a collective.

    Args:
        device: cpu, cuda, or auto, as in `use_cuda`.
        timeout: seconds until a collective fails because a rank did not join; see `collective_timeout`.

    Raises:
        ConfigError: if cuda is requested and this node has too few GPUs, or no rendezvous is configured.
    """
    require_rendezvous()
    order_launches()
    cuda = use_cuda(device)
    rank_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(rank_device)
    creates_group = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if creates_group:
        limit, bound_device = collective_timeout(timeout, cuda), rank_device if cuda else None
        dist.init_process_group("nccl" if cuda else "gloo", timeout=limit, device_id=bound_device)
    yield transfer_communicator(None), rank_device
    if creates_group:
        dist.destroy_process_group()


def use_cuda(device: str) -> bool:
    """Return whether this process computes on a GPU, given the device cpu, cuda, or auto.

    auto means cuda if this node has one GPU per process and the launch configuration does not request the CPU.

    Raises:
        ConfigError: if cuda is requested and this node has too few GPUs.
    """
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda" and gpus < processes:
        raise ConfigError(
            f"--device cuda: this node has {gpus} GPUs for {processes} processes; start fewer, or use --device cpu"
        )
    if device != "auto" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        return device == "cuda"
    if 0 < gpus < processes and os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning("computing on the CPU: this node has %d GPUs for %d processes; start fewer", gpus, processes)
    return gpus >= processes


def collective_timeout(seconds: float | None, cuda: bool) -> timedelta:
    """Return the timeout of collectives: `seconds`, or by default 600 s on GPUs and 300 s on CPU."""
    return timedelta(seconds=seconds or (600 if cuda else 300))


def require_rendezvous() -> None:
    """Raise ConfigError if a launcher such as srun or mpirun started several processes without a rendezvous address."""
    processes, variable = launched_processes()
    if processes > 1 and variable != "WORLD_SIZE" and not dist.is_initialized():
        raise ConfigError(
            f"{variable}={processes}: {processes} processes were started, and each would process all of the data; "
            "start the script with torchrun or accelerate launch, once on each node"
        )
