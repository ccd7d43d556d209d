"""One rank is killed between two passes: the others must end with a message, within the timeout."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

import torch
from gpu_checks.processes import Ended
from gpu_checks.ranks_attention import HEADS
from gpu_checks.rows import Row

from mllm_seqpar.attention import lv_xattn
from mllm_seqpar.comm import Communicator

TIMEOUT_S = 15.0
"""Time limit of the process group in this check."""
MARGIN_S = {"cuda": 75.0, "cpu": 30.0}
"""Time that ranks may need in addition: to start, and for NCCL's watchdog to write its report and abort the process."""
MESSAGES = ("another rank ended", "most likely ended", "watchdog", "timeout", "timed out", "nccl")


def check(comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Run passes until the group fails; the last rank kills itself in the third pass. Yields nothing."""
    heads, groups, dim = HEADS[device.type]
    q, k, v = (torch.randn(1, h, 64, dim, device=device, requires_grad=True) for h in (heads, groups, groups))
    for number in range(1000):
        if number == 2 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        lv_xattn(q, k, v, group=comm).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
    yield Row("lost rank", "", "no rank was killed", "", False)


def rows_of(ended: Sequence[Ended], device: str) -> list[Row]:
    """Return one row for each rank that was not killed."""
    limit = TIMEOUT_S + MARGIN_S[device]
    rows = []
    for rank in ended[:-1]:
        named = any(text in rank.errors.lower() for text in MESSAGES)
        ok = bool(rank.status) and rank.seconds <= limit and named
        found = rank.problem or f"rank {rank.rank} ended with status 0"
        rows.append(Row("lost rank", f"rank {rank.rank} of {len(ended)}", found, f"a message within {limit:.0f} s", ok))
    return rows
