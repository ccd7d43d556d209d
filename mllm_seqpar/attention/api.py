"""The functional layer: distributed attention for those who bring their own model.

Shapes: q (B, H, s_q, D), k and v (B, G, s_kv, D) with G dividing H (GQA, never expanded) are this rank's shards; s_q is
the same on every rank, s_kv may differ. k and v may have a batch of 1 that all batch items of q share. Results are
exact: what one softmax over all ranks' keys gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from ..comm import Communicator, Group, as_communicator
from ..errors import MaskError, ShapeError
from ..masks import Blocks, CausalBlocks, FrameMask, FullBlocks
from ..sharding import frame_bounds
from .checks import agree_on_keys, check_qkv
from .distributed import Plan
from .joint import attend
from .sources import GivenKeys


@overload
def lv_xattn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mask: FrameMask | None = ..., scale: float | None = ...,
    kernel: str = ..., overlap: bool = ..., accumulate_dtype: torch.dtype | None = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def lv_xattn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mask: FrameMask | None = ..., scale: float | None = ...,
    kernel: str = ..., overlap: bool = ..., accumulate_dtype: torch.dtype | None = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def lv_xattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    mask: FrameMask | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    overlap: bool = True,
    accumulate_dtype: torch.dtype | None = torch.float32,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LV-XAttn (arXiv 2502.02406): K and V stay where they are, Q and (O, lse) go round.

    Args:
        q, k, v: this rank's shards, see above; k and v hold the frames of `frame_range(total, group)`.
        group: ProcessGroup, one-dimensional DeviceMesh, or None for the whole world (one process: a group of one).
        mask: which frames this rank's rows see; None: all keys.
        scale: factor of q k^T; None: D ** -0.5.
        kernel: block kernel by name, or "auto".
        overlap: transfers under computation; False only to measure.
        accumulate_dtype: what O travels in; None: q.dtype.
        return_lse: also return lse (B, H, s_q) float32, natural logarithm; no gradient flows through it.

    Returns:
        o (B, H, s_q, D) in q.dtype. A row that sees nothing has o = 0 and lse = -inf. Differentiable in q, k, v.

    Raises:
        ShapeError, MaskError: shapes that do not fit; AgreementError: ranks that disagree, on every rank.
    """
    comm = as_communicator(group)
    return _attend_one(q, k, v, comm, (comm.size, 1), mask, scale, kernel, overlap, accumulate_dtype, return_lse)


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., causal: bool = ..., layout: str = ...,
    mask: FrameMask | None = ..., scale: float | None = ..., kernel: str = ..., overlap: bool = ...,
    accumulate_dtype: torch.dtype | None = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., causal: bool = ..., layout: str = ...,
    mask: FrameMask | None = ..., scale: float | None = ..., kernel: str = ..., overlap: bool = ...,
    accumulate_dtype: torch.dtype | None = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    causal: bool = False,
    layout: str = "zigzag",
    mask: FrameMask | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    overlap: bool = True,
    accumulate_dtype: torch.dtype | None = torch.float32,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Ring Attention (arXiv 2310.01889): Q and O stay where they are, K and V go round; GQA stays unexpanded.

    Args:
        causal: row p sees keys up to p of the sequence that `shard_sequence` dealt in `layout`; then s_kv = s_q.
        layout: "zigzag", "striped" or "contiguous"; matters with `causal` only.
        mask: which frames this rank's rows see, for cross-attention; not together with `causal`.

    The other arguments, the result and the errors are those of `lv_xattn`.
    """
    comm = as_communicator(group)
    blocks: Blocks | None = None
    if causal:
        if mask is not None:
            raise MaskError("ring_attention: causal=True and a FrameMask exclude each other; pass one of them")
        if q.dim() == 4 and q.shape[2] != k.shape[2]:
            raise ShapeError(f"ring_attention: causal attention needs as many keys as queries; got {q.shape[2]} and {k.shape[2]}")
        blocks = CausalBlocks(q.shape[0], q.shape[2] * comm.size, comm.size, layout)
    return _attend_one(
        q, k, v, comm, (1, comm.size), mask, scale, kernel, overlap, accumulate_dtype, return_lse, blocks
    )


def _attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: Communicator,
    tile: tuple[int, int],
    mask: FrameMask | None,
    scale: float | None,
    kernel: str,
    overlap: bool,
    accumulate_dtype: torch.dtype | None,
    return_lse: bool,
    blocks: Blocks | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    check_qkv(q, k, v)
    key_lengths = agree_on_keys(q, k, comm)
    if blocks is None:
        blocks = blocks_for(mask, q, key_lengths, comm)
    plan = Plan(tile, blocks, key_lengths, accumulation(accumulate_dtype, q.dtype), overlap)
    o, lse = attend(
        q, [GivenKeys(plan, k, v)], comm=comm, scale=q.shape[-1] ** -0.5 if scale is None else scale, kernel=kernel
    )
    return (o, lse) if return_lse else o


def accumulation(dtype: torch.dtype | None, of: torch.dtype) -> torch.dtype:
    """What partial results are summed in: `dtype`, or wider where the inputs are; None: as the inputs."""
    return of if dtype is None else torch.promote_types(dtype, of)


def blocks_for(mask: FrameMask | None, q: Tensor, key_lengths: Sequence[int], comm: Communicator) -> Blocks:
    """The tiles of all blocks for this rank's frame mask, after checking that it fits q and the ranks' keys.

    Raises:
        MaskError: the mask has other rows than q, or the keys are not those of `frame_range` of its frames.
    """
    if mask is None:
        return FullBlocks(q.shape[0], q.shape[2], tuple(key_lengths))
    if mask.shape != (q.shape[0], q.shape[2]):
        raise MaskError(f"mask: has (batch, rows) {mask.shape}; this rank's q has {(q.shape[0], q.shape[2])}")
    frames = frame_bounds(mask.total_frames, comm.size)
    expected = tuple((stop - start) * mask.tokens_per_frame for start, stop in frames)
    if expected != tuple(key_lengths):
        raise MaskError(
            f"mask: {mask.total_frames} frames of {mask.tokens_per_frame} tokens mean {list(expected)} keys on the ranks "
            f"(frame_range), but they hold {list(key_lengths)}"
        )
    return mask.blocks(comm, frames)
