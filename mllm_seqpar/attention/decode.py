"""Attention of replicated queries over sharded keys: decoding, and prefilling with replicated text.

Every rank has the same q and its own keys. Each computes (o, lse) over its own keys; then the partial results of all
ranks are merged (Star Attention, arXiv 2411.17116, phase 2; flash decoding across devices). With few rows this is one
all-gather. With many rows each rank merges a part of them and the merged rows are gathered, which sends 2 (n - 1)/n of
a result instead of n - 1 results. All ranks merge the same numbers in the same order and therefore have bitwise equal
results, so that they sample the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.comm import Communicator, Group, transfer_communicator
from mllm_seqpar.errors import ConfigError, MaskError
from mllm_seqpar.kernels.base import fold_groups, unfold_groups
from mllm_seqpar.masks import FrameMask, Rectangle, full_rectangle
from mllm_seqpar.sharding import frame_range

from .argument_checks import check_flags, check_mask, check_mask_type, check_qkv, check_scale
from .block_math import BlockMath, PartialResult, fold, prepare, unfold
from .call_spec import accumulation
from .joint import eager

SCATTER_ROWS = 64
"""From this number of rows on, each rank merges a part of them."""


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
    """Return the attention of queries that every rank has over keys that are sharded. For inference: no gradients.

    Args:
        q: (B, H, s_q, D), the same on every rank.
        k, v: (B or 1, G, s_kv, D), this rank's keys; s_kv may differ by rank and be 0.
        group: as for `lv_xattn`.
        mask: the frames that each row attends to, the same on every rank; this rank holds `frame_range` of them.
        scale: factor of q k^T; None: D ** -0.5.
        kernel: name of a block kernel, or "auto".
        return_lse: also return lse (B, H, s_q) float32.
        units_per_frame: how many of the mask's "frames" (image tiles, for example) make one frame that `frame_range`
            keeps on one rank.

    Returns:
        o (B, H, s_q, D) in q.dtype, the same bits on every rank.

    Raises:
        ConfigError: gradients are required.
        ShapeError, MaskError: the shapes do not match.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise ConfigError("decode_attention has no backward pass; call it under torch.no_grad(), or use lv_xattn")
    check_qkv(q, k, v)
    check_mask_type(mask)
    check_scale(scale)
    check_flags(return_lse=return_lse)
    _check_units(units_per_frame, mask)
    comm = transfer_communicator(group)
    prepared = prepare_frames(q, k, mask, comm, kernel, units_per_frame)
    o, lse = merge_over_ranks(*prepared.partial(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale), comm)
    return (o.to(q.dtype), lse) if return_lse else o.to(q.dtype)


def prepare_frames(
    q: Tensor, k: Tensor, mask: FrameMask | None, comm: Communicator, kernel: str, units_per_frame: int = 1
) -> PreparedAttention:
    """Return the attention to this rank's keys, for tensors of these shapes; arguments as for `decode_attention`."""
    batch = q.shape[0]
    if mask is None:
        folded = k.shape[0] < batch
        rows = full_rectangle(1 if folded else batch, (batch if folded else 1) * q.shape[2], k.shape[2])
        return PreparedAttention(q, k, rows, kernel)
    frames = frame_range(mask.total_frames // units_per_frame, comm)
    start, stop = frames.start * units_per_frame, frames.stop * units_per_frame
    check_mask(mask, q, k, (start, stop))
    return PreparedAttention(q, k, (mask.folded() if k.shape[0] < batch else mask).rectangles(start, stop), kernel)


class PreparedAttention:
    """Attention to this rank's keys with kernels and rectangles that are chosen once, for all layers of a pass.

    Calls must have tensors of the shapes, dtype and device that it was prepared for. Only `output` has gradients, if it
    is `differentiable`.

    Args:
        q: (B, H, s_q, D).
        k: (B or 1, G, s_kv, D). If it has a batch of 1 and q has not, the batch of q is folded into its rows.
        rectangles: the mask rectangles, of the folded rows.
        kernel: name of a block kernel, or "auto".
    """

    def __init__(self, q: Tensor, k: Tensor, rectangles: Sequence[Rectangle], kernel: str) -> None:
        self._batch = q.shape[0] if k.shape[0] < q.shape[0] else None
        self._dtype, self._kernel = accumulation(torch.float32, q.dtype), kernel
        self._rectangles = prepare(rectangles, q, k, kernel)
        self._visible_keys: slice | None = None
        """The keys that all rows attend to, if no row attends to others and torch may choose the kernel."""
        items, rows = (q.shape[0], q.shape[2]) if self._batch is None else (1, q.shape[0] * q.shape[2])
        if kernel == "auto" and [(r.batch, r.rows, r.kind) for r in rectangles] == [((0, items), (0, rows), "full")]:
            self._visible_keys = self._rectangles[0].keys

    @property
    def differentiable(self) -> bool:
        """Whether `output` can be differentiated: it is then torch's own operator."""
        return self._visible_keys is not None

    def partial(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (o, lse), contiguous, as partial results: o (B, H, s_q, D) in float32 or wider, lse (B, H, s_q)."""
        rows = q if self._batch is None else fold(q)
        result = PartialResult(rows, self._dtype)
        BlockMath(self._kernel, scale).forward(rows, k, v, self._rectangles, result)
        o, lse = result.value
        return (o, lse) if self._batch is None else (_unfolded(o, self._batch), _unfolded(lse, self._batch))

    def output(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return o (B, H, s_q, D) in q.dtype alone, on one process."""
        keys = self._visible_keys
        if keys is None:
            return self.partial(q, k, v, scale)[0].to(q.dtype)
        rows = q if self._batch is None else fold(q)
        # Without a mask rows are independent: the query heads of a KV head are rows of one head.
        o = F.scaled_dot_product_attention(fold_groups(rows, k.shape[1]), k[:, :, keys], v[:, :, keys], scale=scale)
        o = unfold_groups(o, q.shape[1])
        return o if self._batch is None else unfold(o, self._batch)


def _unfolded(x: Tensor, batch: int) -> Tensor:
    return unfold(x, batch).contiguous()


def _check_units(units: int, mask: FrameMask | None) -> None:
    total = 0 if mask is None else mask.total_frames
    if isinstance(units, bool) or not isinstance(units, int) or units < 1 or total % units:
        raise MaskError(
            f"units_per_frame: {units!r} does not divide the {total} units of the mask; pass the number of units that "
            "make a frame, 1 or more"
        )


@eager
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
