"""From a strategy's name and the shapes of a call to its plan; a pure function, so that all ranks make the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mllm_seqpar.masks import BlockMasks
from mllm_seqpar.schedules import OverlapRatios
from mllm_seqpar.schedules.bytes_sent import Problem, overlap_ratios_by_bytes
from mllm_seqpar.schedules.mesh_shapes import least_bytes_tile, tile_and_heads

from .distributed import CallSpec


def accumulation(dtype: torch.dtype | None, of: torch.dtype) -> torch.dtype:
    """What partial results are summed in: `dtype`, or wider where the inputs are; None: as the inputs."""
    return of if dtype is None else torch.promote_types(dtype, of)


def problem_of(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    key_lengths: tuple[int, ...],
    dtype: torch.dtype,
    accumulate_dtype: torch.dtype | None,
) -> Problem:
    """What is known of a call before it: q (B, H, s, D), k (B or 1, G, ...), the keys of every rank, the dtypes."""
    batch, heads, rows, dim = q_shape
    return Problem(
        rows=rows,
        keys=key_lengths,
        heads=heads,
        kv_heads=k_shape[1],
        dim=dim,
        batch=batch,
        key_batch=k_shape[0],
        element=dtype.itemsize,
        accumulated=accumulation(accumulate_dtype, dtype).itemsize,
    )


def plan_for(
    strategy: str,
    tile: tuple[int, int] | None,
    blocks: BlockMasks,
    problem: Problem,
    accumulate_dtype: torch.dtype,
    overlap: bool = True,
    overlap_ratios: tuple[OverlapRatios, OverlapRatios] | None = None,
) -> CallSpec:
    """The plan of a strategy; a mesh without a tile takes the one that sends the fewest bytes.

    `hides`: what a mesh's order of steps is worked out for, forward and backward; None: by the bytes.

    Raises:
        ConfigError: a tile that does not fit the number of ranks.
    """
    chosen, heads = tile_and_heads(strategy, tile, problem.ranks)
    if chosen is None:
        chosen = least_bytes_tile(problem)
    if overlap_ratios is None and 1 not in chosen:
        overlap_ratios = (
            overlap_ratios_by_bytes(problem, backward=False),
            overlap_ratios_by_bytes(problem, backward=True),
        )
    return CallSpec(
        chosen,
        blocks,
        problem.keys,
        accumulate_dtype,
        overlap,
        heads,
        overlap_ratios or (OverlapRatios(), OverlapRatios()),
    )
