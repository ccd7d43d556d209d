"""The functional layer: distributed attention without a patched model.

Shapes: q (B, H, s_q, D), k and v (B, G, s_kv, D) are this rank's shards, with G dividing H (GQA, never expanded). s_q
is the same on every rank, s_kv may differ. k and v may have a batch of 1, shared by all batch items of q; with
`causal` they are then repeated for each item. Results are exact: those of one softmax over all ranks' keys. Inside
`torch.utils.checkpoint` (use_reentrant=False), o and lse are kept, and the recomputation in backward does not compute
attention again (`kept_results`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from mllm_seqpar._compat import eager
from mllm_seqpar.comm import Group, transfer_communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, ShapeError
from mllm_seqpar.kernels import choose_kernel
from mllm_seqpar.masks import BlockMasks, FrameMask
from mllm_seqpar.masks.block_masks import text_masks
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.schedules.head_sharding import HeadShards
from mllm_seqpar.schedules.mesh_shapes import check_tile, parallel_spec, resolve_tile
from mllm_seqpar.sharding import LAYOUTS, Spans, describe_spans, sequence_positions

from .attend import attend
from .call_spec import AccumulateDtype, CallSpec, accumulation, call_spec_for, problem_of
from .keys import GivenKeys


class SharedOptions(TypedDict, total=False):
    """The options of all functions; see `lv_xattn`."""

    group: Group
    mask: FrameMask | None
    scale: float | None
    kernel: str
    overlap: bool
    accumulate_dtype: AccumulateDtype


class TextOptions(SharedOptions, total=False):
    """The options of functions that can also compute self-attention of text; see `ring_attention`."""

    causal: bool
    layout: str


class TileOptions(TextOptions, total=False):
    """The options of functions with a choice of mesh shape; see `mesh_attention`."""

    tile: tuple[int, int] | None


@overload
def lv_xattn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[SharedOptions]
) -> Tensor: ...
@overload
def lv_xattn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[SharedOptions]
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
    accumulate_dtype: AccumulateDtype = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LV-XAttn (arXiv 2502.02406): K and V stay on their ranks; Q and (O, lse) are sent around the ring.

    If the mask makes some (row, rank) pairs empty, Q is sent point to point instead: each rank receives only the rows
    that attend to any of its keys, directly from their owner.

    Args:
        q, k, v: this rank's shards, see above; k and v hold the frames of `frame_range(total, group)`, or, if the mask
            has frames of unequal size, of `frame_range(total, group, tokens_per_frame)`.
        group: ProcessGroup, one-dimensional DeviceMesh, or None for the whole world (one process: a group of one).
        mask: the frames that this rank's rows attend to; None: all keys.
        scale: factor of q k^T; None: D ** -0.5.
        kernel: name of a block kernel, or "auto"; a block that needs a mask falls back to "auto" if the named kernel
            takes none.
        overlap: whether transfers run during computation; False only to measure.
        accumulate_dtype: dtype that O, dQ, dK and dV are accumulated and sent in: torch.float32, None for q.dtype, or
            "auto": torch.float32, but results that go straight to their owner are sent in q.dtype.
        return_lse: also return lse (B, H, s_q), natural logarithm, float32 (float64 for float64 inputs). It carries no
            gradient.

    Returns:
        o (B, H, s_q, D) in q.dtype, differentiable in q, k and v. A row without visible keys has o = 0, lse = -inf.

    Raises:
        ShapeError, MaskError, ConfigError: invalid arguments, on the rank that passes them.
        AgreementError: on every rank if the ranks disagree; on the other ranks if one passes invalid arguments.
    """
    return _attend_once(
        "lv-xattn", None, q, k, v, group, False, "zigzag", mask, scale, kernel, overlap, accumulate_dtype, return_lse
    )


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
    accumulate_dtype: AccumulateDtype = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Ring Attention (arXiv 2310.01889): Q and O stay on their ranks, K and V are sent around the ring; GQA stays
    unexpanded.

    Args:
        causal: token p attends to tokens up to p of the sequence that `shard_sequence` sharded in `layout`; requires
            s_kv = s_q.
        layout: "zigzag", "striped" or "contiguous"; only used with `causal`.
        mask: the frames that this rank's rows attend to, for cross-attention; not together with `causal`.

    The other arguments, the result and the errors are those of `lv_xattn`.
    """
    return _attend_once(
        "ring", None, q, k, v, group, causal, layout, mask, scale, kernel, overlap, accumulate_dtype, return_lse
    )


@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[TileOptions]
) -> Tensor: ...
@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[TileOptions]
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
    accumulate_dtype: AccumulateDtype = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mesh-Attention: each rank computes the a x b blocks of its Q group and its KV group (`schedules.mesh`).

    Args:
        tile: the mesh shape (a, b) with a * b = n: Q and O are sent among a ranks, K and V among b. (n, 1) is LV-XAttn,
            (1, n) is Ring Attention. None: the shape that sends the fewest bytes, forward and backward together.

    The other arguments, the result and the errors are those of `ring_attention`.
    """
    return _attend_once(
        "mesh", tile, q, k, v, group, causal, layout, mask, scale, kernel, overlap, accumulate_dtype, return_lse
    )


@overload
def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[TileOptions]
) -> Tensor: ...
@overload
def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[TileOptions]
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
    accumulate_dtype: AccumulateDtype = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """DeepSpeed-Ulysses (arXiv 2309.14509): all-to-all to shard the heads, attention, all-to-all back.

    Args:
        tile: None: all n ranks shard the heads. (a, b), with a * b dividing n: every n / (a b) consecutive ranks shard
            the heads, and the ranks with the same heads run this mesh shape, as in `mesh_attention`. This is the hybrid
            of USP (arXiv 2405.07719).

    The other arguments, the result and the errors are those of `ring_attention`. A ConfigError names the largest group
    that the query heads can be sharded over. KV heads are repeated only as far as that group needs it.
    """
    return _attend_once(
        "ulysses", tile, q, k, v, group, causal, layout, mask, scale, kernel, overlap, accumulate_dtype, return_lse
    )


@eager
def _attend_once(
    strategy: str,
    tile: tuple[int, int] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    causal: bool,
    layout: str,
    mask: FrameMask | None,
    scale: float | None,
    kernel: str,
    overlap: bool,
    accumulate_dtype: AccumulateDtype,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    comm = transfer_communicator(group)
    mesh_shape = tuple(tile) if isinstance(tile, list) else tile
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    frames = mask.sizes.spans(comm.size) if isinstance(mask, FrameMask) else ()

    def check() -> dict[str, object]:
        flags = {"overlap": overlap, "return_lse": return_lse, "causal": causal}
        _check_arguments(q, k, v, mask, scale, kernel, flags, accumulate_dtype, layout)
        shape, head_degree = resolve_tile(strategy, None if tile is None else check_tile(tile), comm.size)
        HeadShards(q.shape[1], k.shape[1], head_degree)
        facts = {"strategy": strategy, "tile": shape, "accumulate_dtype": accumulate_dtype, "layout": causal and layout}
        if causal:
            if mask is not None:
                raise MaskError(f"{strategy}: causal=True and a FrameMask exclude each other; pass one of them")
            if q.shape[2] != k.shape[2]:
                raise ShapeError(f"causal attention needs as many keys as queries; got {q.shape[2]} and {k.shape[2]}")
            sequence_positions(q.shape[2] * comm.size, comm.rank, comm.size, layout)
        if mask is not None:
            check_mask(mask, q, k, frames[comm.rank])
        return _common_facts(q, k, factor, mask) | facts

    def numbers(_: object) -> list[int]:
        known = 0 if mask is None else mask.gathered_digest(comm, frames)
        # 0: no grad mode; 1: no gradient is required; 2: one is
        grad_mode = 0 if not torch.is_grad_enabled() else 2 if any(x.requires_grad for x in (q, k, v)) else 1
        return [k.shape[2], grad_mode, known, 0 if mask is None else mask.bounds.shape[0]]

    _, by_rank = agree(comm, "attention", check, dict, numbers=numbers)
    lengths, grad_modes, digests, layers = zip(*by_rank, strict=True)
    key_lengths, known = tuple(lengths), set(digests)
    if 2 in grad_modes and 0 in grad_modes:
        without = ", ".join(str(rank) for rank, mode in enumerate(grad_modes) if mode == 0)
        raise AgreementError(
            f"rank {without} of the group runs without gradients (torch.no_grad) where other ranks require them; the "
            "backward pass needs all ranks"
        )
    # Every rank must take part in the backward pass. With head sharding, resharding q already requires its gradient.
    if 2 in grad_modes and not (q.requires_grad or (strategy != "ulysses" and (k.requires_grad or v.requires_grad))):
        q = q.detach().requires_grad_()
    if causal:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))  # text has keys of its own for each item
        total = q.shape[2] * comm.size
        masks = text_masks([sequence_positions(total, rank, comm.size, layout) for rank in range(comm.size)])
    elif mask is not None:
        masks = mask.blocks(comm, frames, layers=max(layers), refresh=0 in known or len(known) > 1)
    else:
        masks = BlockMasks.full(q.shape[0], q.shape[2], key_lengths)
    problem = problem_of(q.shape, k.shape[:2], key_lengths, q.dtype, accumulate_dtype)
    dtype = accumulation(accumulate_dtype, q.dtype)
    spec = call_spec_for(parallel_spec(strategy, mesh_shape, problem), masks, problem, dtype, overlap)
    keys = GivenKeys(spec, k, v)
    (result,) = attend(q, [[keys]], rows="sharded", comm=comm, scale=float(factor), kernel=kernel)
    return result if return_lse else result[0]


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
        ConfigError: gradients are required, or another argument is invalid; on the rank that passes it.
        ShapeError, MaskError: the shapes do not match; on the rank that passes them.
        AgreementError: on every rank if the ranks disagree; on the other ranks if one passes invalid arguments.
    """
    comm = transfer_communicator(group)
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def check() -> BlockMasks:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise ConfigError("decode_attention has no backward pass; call it under torch.no_grad(), or use lv_xattn")
        _check_arguments(q, k, v, mask, scale, kernel, {"return_lse": return_lse})
        total = 0 if mask is None else mask.total_frames
        if type(units_per_frame) is not int or units_per_frame < 1 or total % units_per_frame:
            raise MaskError(
                f"units_per_frame: {units_per_frame!r} does not divide the {total} units of the mask; pass the number "
                "of units that make a frame, 1 or more"
            )
        if mask is None:
            return BlockMasks.full(q.shape[0], q.shape[2], [k.shape[2]])
        own = mask.sizes.joined(units_per_frame).spans(comm.size)[comm.rank]
        own = tuple((start * units_per_frame, stop * units_per_frame) for start, stop in own)
        check_mask(mask, q, k, own)
        return frame_masks([mask], [own])

    def facts(_: object) -> dict[str, object]:
        return _common_facts(q, k, factor, mask) | {"units_per_frame": units_per_frame}

    masks = agree(comm, "decode_attention", check, facts)
    keys = GivenKeys(CallSpec((1, 1), masks, (k.shape[2],), accumulation("auto", q.dtype)), k, v)
    (result,) = attend(q, [[keys]], rows="replicated", comm=comm, scale=float(factor), kernel=kernel)
    return result if return_lse else result[0]


def _common_facts(q: Tensor, k: Tensor, scale: float, mask: FrameMask | None) -> dict[str, object]:
    """Return the properties of the arguments that must be equal on all ranks in every function."""
    facts: dict[str, object] = dict(zip(("q batch", "q heads", "q rows", "head dim"), q.shape, strict=True))
    facts |= {"k batch": k.shape[0], "k heads": k.shape[1], "dtype": q.dtype, "scale": float(scale)}
    if mask is not None:
        facts |= {"mask": "given", "mask frames": mask.total_frames, "mask tokens per frame": mask.sizes.fact}
    return facts


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FrameMask | None,
    scale: float | None,
    kernel: str,
    flags: Mapping[str, bool],
    accumulate_dtype: AccumulateDtype = "auto",
    layout: str = "zigzag",
) -> None:
    """Raise unless q is (B, H, s_q, D), k and v (B or 1, G, s_kv, D), and each other argument has a valid value."""
    problem = None
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        problem = "expected q (B, H, s_q, D) and k, v of one shape (B, G, s_kv, D)"
    elif k.shape[0] not in (1, q.shape[0]) or k.shape[3] != q.shape[3]:
        problem = "k and v must have q's head dim, and its batch or a batch of 1"
    elif k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        problem = f"{q.shape[1]} query heads cannot share {k.shape[1]} key-value heads: no whole multiple"
    elif not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        problem = "q, k and v must share one dtype and device"
    elif q.dtype not in _DTYPES:
        problem = f"q, k and v must be floating point ({', '.join(map(str, _DTYPES))})"
    if problem is not None:
        given = (f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in zip("qkv", (q, k, v), strict=True))
        raise ShapeError(f"{problem}; got {', '.join(given)}")
    # A tensor as scale would lose its gradient.
    finite = isinstance(scale, Real) and not isinstance(scale, bool) and math.isfinite(scale)
    dtypes, dtype = (*_DTYPES, "auto", None), accumulate_dtype
    for name, value, valid, allowed in (
        ("scale", scale, scale is None or finite, "a finite number, or None for head dim ** -0.5"),
        ("accumulate_dtype", dtype, dtype in dtypes, '"auto", torch.float32, or None for the dtype of q'),
        ("layout", layout, layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}"),
        *[(flag, value, isinstance(value, bool), "True or False") for flag, value in flags.items()],
    ):
        if not valid:
            raise ConfigError(f"{name}: {value!r:.80} is invalid; pass {allowed}")
    if mask is not None and not isinstance(mask, FrameMask):
        raise MaskError(
            f"mask: expected a FrameMask or None, got {type(mask).__name__}; build one with FrameMask.from_dense (a "
            "table of rows and frames) or FrameMask.from_intervals (the first and the end frame of each row)"
        )
    choose_kernel(kernel, q, k)


def check_mask(mask: FrameMask, q: Tensor, k: Tensor, frames: Spans) -> None:
    """Raise MaskError unless the mask has q's rows and k holds the keys of these frames."""
    if mask.shape != (q.shape[0], q.shape[2]):
        raise MaskError(f"mask: has (batch, rows) {mask.shape}; this rank's q has {(q.shape[0], q.shape[2])}")
    keys = mask.sizes.count(frames)
    if keys != k.shape[2]:
        raise MaskError(
            f"mask: of its {mask.total_frames} frames of {mask.sizes.fact} tokens this rank holds frames "
            f"{describe_spans(frames)} (frame_range), which means {keys} keys; k has {k.shape[2]}"
        )
