"""Attention of replicated queries over sharded keys: what decoding does, and prefilling with replicated text.

Every rank has the same q and its own keys. It computes (o, lse) over its own keys; the ranks' partial results are then
merged (Star Attention, arXiv 2411.17116, phase 2; flash decoding across devices). Few rows: one all-gather. Many rows:
each rank merges its share of them and the merged rows are gathered: 2 (n - 1)/n of a result sent instead of n - 1. All
ranks merge the same numbers in the same order, so they hold the same bits: sampling stays in step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mllm_seqpar._eager import eager
from mllm_seqpar.comm import Communicator, Group, Recv, Send, as_communicator
from mllm_seqpar.errors import ConfigError, MaskError
from mllm_seqpar.masks import FrameMask, Rectangle, full_rectangle
from mllm_seqpar.sharding import frame_range

from .block_math import BlockMath, PartialResult, fold, unfold
from .checks import check_flags, check_mask, check_mask_type, check_qkv, check_scale
from .parallel_spec import accumulation

SCATTER_ROWS = 64
"""From this many rows on, merging is shared out over the ranks."""


@eager
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    mask: FrameMask | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    units_per_frame: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Queries that every rank holds, over keys of which every rank holds a part. For inference: no gradients.

    Args:
        q: (B, H, s_q, D), the same on every rank.
        k, v: (B or 1, G, s_kv, D), this rank's keys; s_kv may differ by rank and be 0.
        group: as for `lv_xattn`.
        mask: which frames each row sees, the same on every rank; this rank holds `frame_range` of its frames.
        scale: factor of q k^T; None: D ** -0.5.
        kernel: block kernel by name, or "auto".
        return_lse: also return lse (B, H, s_q) float32.
        units_per_frame: the mask's "frames" are parts of frames (tiles of a picture), that many to each; `frame_range`
            deals whole ones.

    Returns:
        o (B, H, s_q, D) in q.dtype, the same bits on every rank.

    Raises:
        ConfigError: when gradients are asked for; ShapeError, MaskError: shapes that do not fit.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise ConfigError("decode_attention has no backward pass; call it under torch.no_grad(), or use lv_xattn")
    check_qkv(q, k, v)
    check_mask_type(mask)
    check_scale(scale)
    check_flags(return_lse=return_lse)
    _check_units(units_per_frame, mask)
    comm = as_communicator(group)
    batch = q.shape[0]
    rows = fold(q) if k.shape[0] < batch else q
    tiles: tuple[Rectangle, ...]
    if mask is None:
        tiles = full_rectangle(rows.shape[0], rows.shape[2], k.shape[2])
    else:
        frames = frame_range(mask.total_frames // units_per_frame, comm)
        start, stop = frames.start * units_per_frame, frames.stop * units_per_frame
        check_mask(mask, q, k, (start, stop))
        tiles = (mask if rows is q else mask.folded()).rectangles(start, stop)
    partial = PartialResult(rows, accumulation(torch.float32, q.dtype))
    BlockMath(kernel, q.shape[-1] ** -0.5 if scale is None else scale).forward(rows, k, v, tiles, partial)
    o, lse = (x if rows is q else unfold(x, batch).contiguous() for x in partial.value)
    o, lse = merge_over_ranks(o, lse, comm)
    return (o.to(q.dtype), lse) if return_lse else o.to(q.dtype)


def _check_units(units: int, mask: FrameMask | None) -> None:
    total = 0 if mask is None else mask.total_frames
    if isinstance(units, bool) or not isinstance(units, int) or units < 1 or total % units:
        raise MaskError(
            f"units_per_frame: {units!r} does not divide the {total} units of the mask; pass the number of units that "
            "make a frame, 1 or more"
        )


@eager
def merge_over_ranks(o: Tensor, lse: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Each rank's partial (o (B, H, s, D), lse (B, H, s)) of the same rows -> their merge, the same on every rank."""
    if comm.size == 1:
        return o, lse
    both = torch.cat([o, lse.to(o.dtype).unsqueeze(-1)], dim=-1)  # one message instead of two
    rows = both.shape[2]
    if rows < max(SCATTER_ROWS, comm.size):
        return _merge_all(comm.all_gather(both, "o"))
    share = -(-rows // comm.size)
    missing = share * comm.size - rows
    padded = torch.nn.functional.pad(both, (0, 0, 0, missing)) if missing else both  # no padding would be a copy too
    parts = [part.contiguous() for part in padded.split(share, dim=2)]
    arrived = [parts[comm.rank] if peer == comm.rank else torch.empty_like(parts[0]) for peer in range(comm.size)]
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    comm.exchange([Send(p, parts[p], "o") for p in others], [Recv(p, arrived[p]) for p in others]).wait()
    o_share, lse_share = _merge_all(arrived)
    shares = comm.all_gather(torch.cat([o_share, lse_share.to(o.dtype).unsqueeze(-1)], dim=-1), "o")
    whole = torch.cat(shares, dim=2)[:, :, :rows]
    return whole[..., :-1].contiguous(), whole[..., -1].contiguous()


def _merge_all(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges the ranks' (o | lse) in a few operations, however many ranks there are: a token has many layers."""
    both = torch.stack(parts)
    o, lse = both[..., :-1], both[..., -1]
    total = torch.logsumexp(lse, dim=0)
    # Rows that no rank sees anything of: -inf - (-inf) would be NaN.
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    return o.mul_(weight.unsqueeze(-1)).sum(0), total
