"""The environment variables that NCCL reads, and what a patched model needs of them.

A patched model has its own NCCL communicator in addition to that of FSDP2 or DDP. NCCL allows this if the
operations of both are executed in the same order on all ranks. The package launches them in the same order;
NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 and later) makes the device execute them in that order. torch's defaults of
TORCH_NCCL_ASYNC_ERROR_HANDLING (3) and TORCH_NCCL_DUMP_ON_TIMEOUT (1) end the process when a rank is lost, and write
what each rank had launched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import torch.distributed as dist

from mllm_seqpar._logging import get_logger

_log = get_logger(__name__)


def setting_problems(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable whose value makes transfers slow or unsafe over NCCL."""
    problems = []
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        problems.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue, where transfers and computation "
            "wait for each other; set it to 32"
        )
    if environment.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") == "0":
        problems.append(
            "NCCL_LAUNCH_ORDER_IMPLICIT is not 1, so NCCL does not order the transfers of this model and the "
            "collectives of FSDP2 or DDP, which can deadlock; set it to 1 (NCCL 2.26 or later)"
        )
    handling = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", environment.get("NCCL_ASYNC_ERROR_HANDLING"))
    if handling == "0":
        problems.append("TORCH_NCCL_ASYNC_ERROR_HANDLING=0 makes all ranks hang if one rank dies; remove it")
    return problems


def order_launches() -> None:
    """Set NCCL_LAUNCH_ORDER_IMPLICIT=1, unless the user has set it, there is a process group, or only one process.

    NCCL reads it when the process creates its first communicator, so every program must call this before.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@functools.cache
def warn_about_settings() -> None:
    """Log `setting_problems` of this process, once."""
    if problems := setting_problems(os.environ):
        _log.warning("%s. Set these variables where you start the processes", "; ".join(problems))
