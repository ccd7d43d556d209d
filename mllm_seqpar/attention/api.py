"""The functional layer: distributed attention for those who bring their own model.

Shapes: q (B, H, s_q, D), k and v (B, G, s_kv, D) with G dividing H (GQA, never expanded) are this rank's shards; s_q is
the same on every rank, s_kv may differ. k and v may have a batch of 1 that all batch items of q share. Results are
exact: what one softmax over all ranks' keys gives.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..comm import Communicator, Group, as_communicator
from ..errors import MaskError, ShapeError
from ..kernels import choose_kernel
from ..masks import Blocks, CausalBlocks, FrameMask, FullBlocks
from ..sharding import LAYOUTS, frame_bounds, sequence_positions
from .checks import (
    agree_on_keys,
    check_accumulation,
    check_mask,
    check_qkv,
    dtype_code,
    gradient_state,
    scale_bits,
    wants_gradients,
)
from .distributed import Plan
from .joint import attend
from .sources import GivenKeys


@overload
def lv_xattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    mask: FrameMask | None = ...,
    scale: float | None = ...,
    kernel: str = ...,
    overlap: bool = ...,
    accumulate_dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def lv_xattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    mask: FrameMask | None = ...,
    scale: float | None = ...,
    kernel: str = ...,
    overlap: bool = ...,
    accumulate_dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
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

    Under a mask by which some rows see nothing of some ranks they do not go round: each rank gets the rows that see
    something of it, straight from where they are at home.

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
        ShapeError, MaskError, ConfigError: arguments that do not fit, on the rank that has them; AgreementError: ranks
            that disagree, on every rank, and arguments that another rank refused.
    """
    comm = as_communicator(group)
    return _attend_one(q, k, v, comm, (comm.size, 1), mask, scale, kernel, overlap, accumulate_dtype, return_lse)


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    causal: bool = ...,
    layout: str = ...,
    mask: FrameMask | None = ...,
    scale: float | None = ...,
    kernel: str = ...,
    overlap: bool = ...,
    accumulate_dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    causal: bool = ...,
    layout: str = ...,
    mask: FrameMask | None = ...,
    scale: float | None = ...,
    kernel: str = ...,
    overlap: bool = ...,
    accumulate_dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
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
    if causal and mask is not None:
        raise MaskError("ring_attention: causal=True and a FrameMask exclude each other; pass one of them")
    return _attend_one(
        *(q, k, v, comm, (1, comm.size), mask, scale, kernel, overlap, accumulate_dtype, return_lse),
        layout=layout if causal else None,
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
    layout: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`layout`: the mask is causal, and this is how the sequence was dealt."""
    frames = [] if mask is None else frame_bounds(mask.total_frames, comm.size)

    def check() -> dict[str, int]:
        check_qkv(q, k, v)
        check_accumulation(accumulate_dtype)
        choose_kernel(kernel, q, k, causal=layout is not None, masked=mask is not None)
        facts = {
            "strategy": tile[0],
            "scale": scale_bits(_scale(scale, q)),
            "accumulate_dtype": dtype_code(accumulate_dtype),
        }
        if layout is not None:
            if q.shape[2] != k.shape[2]:
                raise ShapeError(f"causal attention needs as many keys as queries; got {q.shape[2]} and {k.shape[2]}")
            sequence_positions(q.shape[2] * comm.size, comm.rank, comm.size, layout)
            facts["layout"] = 1 + LAYOUTS.index(layout)
        if mask is not None:
            check_mask(mask, q, k, frames[comm.rank])
            facts |= {"mask form": 1 if mask.bounds is not None else 2, "mask frames": mask.total_frames}
            facts["mask tokens per frame"] = mask.tokens_per_frame
        return facts

    def own() -> int:
        mask_is_new = mask is not None and not mask.has_blocks(comm, frames)
        return int(mask_is_new) + 2 * gradient_state(q, k, v)

    key_lengths, told = agree_on_keys(q, k, comm, check, own)
    new = [number % 2 for number in told]
    if wants_gradients([number // 2 for number in told]) and not any(t.requires_grad for t in (q, k, v)):
        q = q.detach().requires_grad_()  # another rank's backward pass needs this one in it
    blocks: Blocks = FullBlocks(q.shape[0], q.shape[2], key_lengths)
    if layout is not None:
        blocks = CausalBlocks(q.shape[0], q.shape[2] * comm.size, comm.size, layout)
    elif mask is not None:
        blocks = mask.blocks(comm, frames, anew=any(new))
    plan = Plan(tile, blocks, key_lengths, accumulation(accumulate_dtype, q.dtype), overlap)
    o, lse = attend(q, [GivenKeys(plan, k, v)], comm=comm, scale=_scale(scale, q), kernel=kernel)
    return (o, lse) if return_lse else o


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def accumulation(dtype: torch.dtype | None, of: torch.dtype) -> torch.dtype:
    """What partial results are summed in: `dtype`, or wider where the inputs are; None: as the inputs."""
    return of if dtype is None else torch.promote_types(dtype, of)
