"""The distributed algorithms with all ranks in one process on one device, against attention on one device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_checks.ranks_attention import exact_rows
from gpu_checks.rows import Row

from mllm_seqpar.comm.loopback import run_loopback

RANKS = 4


def check(device: str) -> Iterator[Row]:
    """Yield errors of every algorithm forward and backward, and of decoding."""
    return exact_rows("ring exact", RANKS, torch.device(device), lambda on_rank: run_loopback(RANKS, on_rank)[0])
