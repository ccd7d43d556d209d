"""On what this process computes, and how long it waits for the others."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from mllm_seqpar.comm import launched_processes
from mllm_seqpar.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


def on_cuda(device: str) -> bool:
    """Whether this process is to compute on a GPU.

    Args:
        device: cpu, cuda, or auto: cuda when this node has a GPU for each of its processes and the launch
            configuration does not ask for the CPU.

    Raises:
        ConfigError: cuda is asked for, and this node has too few GPUs.
    """
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda" and gpus < processes:
        raise ConfigError(
            f"--device cuda: this node has {gpus} GPUs for {processes} processes; start fewer, or use --device cpu"
        )
    asked_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    return device == "cuda" or (device == "auto" and gpus >= processes and not asked_for_cpu)


def time_limit(seconds: float | None, cuda: bool) -> timedelta:
    """How long a collective waits for a rank: `seconds`, or 600 on GPUs and 300 on CPU.

    On CPU the ranks share fewer cores, but nobody waits for half an hour.
    """
    return timedelta(seconds=seconds or (600 if cuda else 300))


def require_rendezvous() -> None:
    """Raise ConfigError under a launcher that does not say where its processes meet: srun, mpirun."""
    processes, variable = launched_processes()
    if processes > 1 and variable != "WORLD_SIZE" and not dist.is_initialized():
        raise ConfigError(
            f"{variable}={processes}: {processes} processes were started, and each would do all of the work alone; "
            "start the script with torchrun or accelerate launch, once on each node"
        )
