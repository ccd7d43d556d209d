"""The functional layer: distributed attention for those who bring their own model.

Shapes: q (B, H, s_q, D), k and v (B, G, s_kv, D) with G dividing H (GQA, never expanded) are this rank's shards; s_q is
the same on every rank, s_kv may differ. k and v may have a batch of 1 that all batch items of q share. Results are
exact: what one softmax over all ranks' keys gives.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from mllm_seqpar.comm import Group
from mllm_seqpar.masks import FrameMask

from .functional_call import CallOptions, attend_once


class Shared(TypedDict, total=False):
    """The options that all functions here have; `lv_xattn` says what they mean."""

    group: Group
    mask: FrameMask | None
    scale: float | None
    kernel: str
    overlap: bool
    accumulate_dtype: torch.dtype | None


class TextOptions(Shared, total=False):
    """Those of the functions that text can attend to itself by."""

    causal: bool
    layout: str


class Tiled(TextOptions, total=False):
    """Those of the functions that take a tile."""

    tile: tuple[int, int] | None


@overload
def lv_xattn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Shared]
) -> Tensor: ...
@overload
def lv_xattn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Shared]
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
        kernel: block kernel by name, or "auto"; blocks that need a mask go to "auto" where the named one takes none.
        overlap: transfers under computation; False only to measure.
        accumulate_dtype: what O travels in; None: q.dtype.
        return_lse: also return lse (B, H, s_q), natural logarithm, float32 (float64 where q is); no gradient flows
            through it.

    Returns:
        o (B, H, s_q, D) in q.dtype. A row that sees nothing has o = 0 and lse = -inf. Differentiable in q, k, v.

    Raises:
        ShapeError, MaskError, ConfigError: arguments that do not fit, on the rank that has them; AgreementError: ranks
            that disagree, on every rank, and arguments that another rank refused.
    """
    options = CallOptions(
        group=group,
        mask=mask,
        scale=scale,
        kernel=kernel,
        overlap=overlap,
        accumulate_dtype=accumulate_dtype,
        return_lse=return_lse,
    )
    return attend_once(q, k, v, "lv-xattn", None, options)


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[TextOptions]
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[TextOptions]
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
    options = CallOptions(
        group=group,
        mask=mask,
        scale=scale,
        kernel=kernel,
        overlap=overlap,
        accumulate_dtype=accumulate_dtype,
        return_lse=return_lse,
        causal=causal,
        layout=layout,
    )
    return attend_once(q, k, v, "ring", None, options)


@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Tiled]
) -> Tensor: ...
@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Tiled]
) -> tuple[Tensor, Tensor]: ...
def mesh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    tile: tuple[int, int] | None = None,
    causal: bool = False,
    layout: str = "zigzag",
    mask: FrameMask | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    overlap: bool = True,
    accumulate_dtype: torch.dtype | None = torch.float32,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mesh-Attention: a rank computes the a x b blocks of its Q group and its KV group; see `schedules.mesh`.

    Args:
        tile: (a, b) with a * b = n: Q and O travel among a ranks, K and V among b. (n, 1) is LV-XAttn, (1, n) is Ring
            Attention. None: the tile that sends the fewest bytes, forward and backward.

    The other arguments, the result and the errors are those of `ring_attention`.
    """
    options = CallOptions(
        group=group,
        mask=mask,
        scale=scale,
        kernel=kernel,
        overlap=overlap,
        accumulate_dtype=accumulate_dtype,
        return_lse=return_lse,
        causal=causal,
        layout=layout,
    )
    return attend_once(q, k, v, "mesh", tile, options)


@overload
def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Tiled]
) -> Tensor: ...
@overload
def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Tiled]
) -> tuple[Tensor, Tensor]: ...
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    tile: tuple[int, int] | None = None,
    causal: bool = False,
    layout: str = "zigzag",
    mask: FrameMask | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    overlap: bool = True,
    accumulate_dtype: torch.dtype | None = torch.float32,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """DeepSpeed-Ulysses (arXiv 2309.14509): all-to-all to heads, attention over everything, all-to-all back.

    Args:
        tile: None: all n ranks deal heads. (a, b), with a * b dividing n: every n / (a b) consecutive ranks deal heads,
            and among ranks with the same heads Q and O travel as in LV-XAttn (n', 1), K and V as in Ring Attention
            (1, n'), or both: the hybrid of USP (arXiv 2405.07719).

    The other arguments, the result and the errors are those of `ring_attention`; a ConfigError names the largest group
    that the query heads can be dealt to. Key heads are repeated only as far as that group needs it.
    """
    options = CallOptions(
        group=group,
        mask=mask,
        scale=scale,
        kernel=kernel,
        overlap=overlap,
        accumulate_dtype=accumulate_dtype,
        return_lse=return_lse,
        causal=causal,
        layout=layout,
    )
    return attend_once(q, k, v, "ulysses", tile, options)
