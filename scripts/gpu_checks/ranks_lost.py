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

TIMEOUT_S = 30.0
"""Time limit of the process group in this check."""
MARGIN_S = {"cuda": 60.0, "cpu": 30.0}
"""Time that ranks may need in addition: on CUDA, NCCL's watchdog writes its report and aborts the process."""
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
    """Return one row for each rank that was not killed; times count from the end of the killed rank."""
    limit, killed = TIMEOUT_S + MARGIN_S[device], ended[-1]
    rows = []
    for rank in ended[:-1]:
        seconds = rank.seconds - killed.seconds
        named = any(text in rank.errors.lower() for text in MESSAGES)
        ok = killed.status == -signal.SIGKILL and bool(rank.status) and seconds <= limit and named
        how = "did not end" if rank.status is None else f"ended with status {rank.status}"
        found = f"{how} after {seconds:.1f} s: {rank.message}"
        rows.append(Row("lost rank", f"rank {rank.rank} of {len(ended)}", found, f"a message within {limit:.0f} s", ok))
    return rows
