"""The merge of the ranks' partial results of the same rows: decoding, and prefilling with replicated text.

Every rank has the same q and its own keys. Each computes (o, lse) over its own keys; then the partial results of all
ranks are merged (Star Attention, arXiv 2411.17116, phase 2; flash decoding across devices). With few rows this is one
all-gather. With many rows each rank merges a part of them and the merged rows are gathered, which sends 2 (n - 1)/n of
a result instead of n - 1 results. All ranks merge the same numbers in the same order and therefore have bitwise equal
results, so that they sample the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.comm import Communicator

SCATTER_ROWS = 64
"""From this number of rows on, each rank merges a part of them."""


def merge_over_ranks(o: Tensor, lse: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return the merge of all ranks' partial (o (B, H, s, D), lse (B, H, s)) of the same rows, on every rank."""
    if comm.size == 1:
        return o, lse
    both = torch.cat([o, lse.to(o.dtype).unsqueeze(-1)], dim=-1)  # one message instead of two
    rows = both.shape[2]
    if rows < max(SCATTER_ROWS, comm.size):
        return _merge_all(_gather(both, comm))
    length = -(-rows // comm.size)
    missing = length * comm.size - rows
    padded = F.pad(both, (0, 0, 0, missing)) if missing else both  # pad always copies
    parts = [part.contiguous() for part in padded.split(length, dim=2)]
    o_part, lse_part = _merge_all(comm.exchange_with_all(parts, "o"))
    merged = comm.all_gather(torch.cat([o_part, lse_part.to(o.dtype).unsqueeze(-1)], dim=-1), "o")
    whole = torch.cat(merged, dim=2)[:, :, :rows]
    return whole[..., :-1].contiguous(), whole[..., -1].contiguous()


def _gather(x: Tensor, comm: Communicator) -> list[Tensor]:
    """Return x (few rows) of all ranks, by rank.

    The all-gather of gloo is a ring of n - 1 messages, one after the other. Messages to all ranks at once take the
    latency of one, and as many bytes. NCCL gathers few bytes in one kernel.
    """
    if x.device.type != "cpu":
        return comm.all_gather(x, "o")
    return comm.exchange_with_all([x] * comm.size, "o")


def _merge_all(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the ranks' (o | lse) in the same few operations for any number of ranks: decoding is bound by launches."""
    both = torch.stack(parts)
    o, lse = both[..., :-1], both[..., -1]
    total = torch.logsumexp(lse, dim=0)
    # A row without visible keys on any rank: -inf - (-inf) would be NaN.
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    return o.mul_(weight.unsqueeze(-1)).sum(0), total
