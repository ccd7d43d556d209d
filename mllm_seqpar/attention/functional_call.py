"""One call of the functional layer: checks, agreement between ranks, the plan, and the attention itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mllm_seqpar._eager import eager
from mllm_seqpar.comm import Group, as_communicator
from mllm_seqpar.errors import ConfigError, MaskError, ShapeError
from mllm_seqpar.kernels import choose_kernel
from mllm_seqpar.masks import BlockMasks, CausalBlockMasks, FrameMask, FullBlockMasks
from mllm_seqpar.schedules.head_sharding import HeadShards
from mllm_seqpar.schedules.mesh_shapes import check_tile, resolve_tile
from mllm_seqpar.sharding import LAYOUTS, frame_bounds, sequence_positions

from .checks import (
    GRADIENT_STATES,
    check_accumulation,
    check_flags,
    check_mask,
    check_mask_type,
    check_qkv,
    check_scale,
    dtype_code,
    gradient_state,
    require_same_keys,
    scale_bits,
    wants_gradients,
)
from .joint import attend
from .kv_sources import GivenKV
from .parallel_spec import accumulation, plan_for, problem_of

STRATEGIES = ("lv-xattn", "ring", "mesh", "ulysses")


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """What the functions of the functional layer have in common; see `lv_xattn`."""

    group: Group = None
    mask: FrameMask | None = None
    scale: float | None = None
    kernel: str = "auto"
    overlap: bool = True
    accumulate_dtype: torch.dtype | None = torch.float32
    return_lse: bool = False
    causal: bool = False
    layout: str = "zigzag"
    """How the sequence was dealt, where the mask is causal."""


@eager
def attend_once(
    q: Tensor, k: Tensor, v: Tensor, strategy: str, tile: tuple[int, int] | None, options: CallOptions
) -> Tensor | tuple[Tensor, Tensor]:
    """One distributed attention by a named strategy; o, or (o, lse)."""
    comm, mask, causal, layout = as_communicator(options.group), options.mask, options.causal, options.layout
    tile = tuple(tile) if isinstance(tile, list) else tile
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    frames = frame_bounds(mask.total_frames, comm.size) if isinstance(mask, FrameMask) else []

    def check() -> dict[str, int]:
        check_qkv(q, k, v)
        check_accumulation(options.accumulate_dtype)
        check_scale(options.scale)
        check_flags(overlap=options.overlap, return_lse=options.return_lse, causal=causal)
        if layout not in LAYOUTS:
            raise ConfigError(f"layout: {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
        check_mask_type(mask)
        choose_kernel(options.kernel, q, k, causal=causal, masked=mask is not None)
        rows, heads = resolve_tile(strategy, None if tile is None else check_tile(tile), comm.size)
        HeadShards(q.shape[1], k.shape[1], heads)
        facts = {
            "strategy": STRATEGIES.index(strategy),
            "scale": scale_bits(float(scale)),
            "accumulate_dtype": dtype_code(options.accumulate_dtype),
        }
        facts |= {"tile rows": 0 if rows is None else rows[0], "tile columns": 0 if rows is None else rows[1]}
        if causal:
            if mask is not None:
                raise MaskError(f"{strategy}: causal=True and a FrameMask exclude each other; pass one of them")
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
        known = 0 if mask is None else mask.gathered_digest(comm, frames)
        return gradient_state(q, k, v) + GRADIENT_STATES * known

    key_lengths, told = require_same_keys(q, k, comm, check, own)
    known = {number // GRADIENT_STATES for number in told}
    wanted = wants_gradients([number % GRADIENT_STATES for number in told])
    # The backward pass needs every rank in it; where heads are dealt, that of q by itself does.
    if wanted and not (q.requires_grad or (strategy != "ulysses" and (k.requires_grad or v.requires_grad))):
        q = q.detach().requires_grad_()
    blocks: BlockMasks = FullBlockMasks(q.shape[0], q.shape[2], key_lengths)
    if causal:
        blocks = CausalBlockMasks(q.shape[0], q.shape[2] * comm.size, comm.size, layout)
    elif mask is not None:
        blocks = mask.blocks(comm, frames, refresh=0 in known or len(known) > 1)
    plan = plan_for(
        strategy,
        tile,
        blocks,
        problem_of(q.shape, k.shape[:2], key_lengths, q.dtype, options.accumulate_dtype),
        accumulation(options.accumulate_dtype, q.dtype),
        options.overlap,
    )
    o, lse = attend(q, [GivenKV(plan, k, v)], comm=comm, scale=float(scale), kernel=options.kernel)
    return (o, lse) if options.return_lse else o
