"""Launches of the Triton programs (`triton_kernels`), as operators of torch, `torch.ops.mllm_seqpar`.

As operators, they work on tensors without data and are seen by dispatch modes. Triton is imported when the first of
them runs. It comes with PyTorch's builds for CUDA.

| operator | launches |
|---|---|
| interval_attention | 1; with divided keys 2 |
| interval_attention_backward | 2: dq, and dk with dv; with divided keys, the parts of dq are added |
| merge_parts | 1: contiguous partial results (P, ..., D) and (P, ...) of the same rows |
| merge_ | 1 instead of the 7 operators of `base.merge_` |
| output_with_row_sums | 1 instead of the 20 operators of `base.output_with_row_sums` |
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FOLDED_ROWS_AT_ONCE = 4096
"""Folded rows whose intervals a tile of keys looks at together, in backward. With more, the pipeline of loads is filled
less often; with fewer, more rows between the items of a batch are skipped."""
PARTS_PER_MULTIPROCESSOR = 2
KEYS_PER_PART = 512
"""Keys are split until there are so many programs for each multiprocessor, but not into shorter parts."""


ROWS_OF_MERGE = 16
"""Rows of one program of the operators without keys."""


class Tiles(NamedTuple):
    """The rows and keys of a tile, and how many warps and pipeline stages Triton gives to a program."""

    rows: int
    keys: int
    warps: int
    stages: int


class Launch(NamedTuple):
    """The tiles of the three programs."""

    forward: Tiles
    dq: Tiles
    dk_dv: Tiles


LAUNCHES = {
    # GPUs of data centres (`SHARED_MEMORY`).
    (True, 2, 64): Launch(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
    (True, 2, 128): Launch(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
    (True, 2, 256): Launch(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 2)),
    # Other GPUs have 100 KiB.
    (False, 2, 64): Launch(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    (False, 2, 128): Launch(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2)),
    (False, 2, 256): Launch(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    # float32: a product is three of TF32 numbers, which together are as exact.
    (False, 4, 64): Launch(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(32, 64, 8, 1)),
    (False, 4, 128): Launch(Tiles(64, 32, 8, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    (False, 4, 256): Launch(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
"""Tiles by (much shared memory, bytes of a number, padded head dim up to this).

They are not tuned by measurement yet. Those for 16 bits and much shared memory are the ones for which the compiler
(Triton 3.9, compute capability 9.0) spills no registers inside the loops, starting from the defaults of FlexAttention
(torch/_inductor/template_heuristics/triton.py of torch 2.13).
"""
SHARED_MEMORY = {(8, 0): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""KiB of shared memory of a program, by compute capability; others have 99."""


def launch_of(dtype: torch.dtype, dim: int, capability: tuple[int, int]) -> Launch:
    """Return the tiles for a dtype, a head dim and a compute capability."""
    size = max(64, padded(dim))
    much = dtype.itemsize == 2 and SHARED_MEMORY.get(capability, 99) >= (227 if size > 128 else 163)
    return LAUNCHES[much, dtype.itemsize, size]


def padded(dim: int) -> int:
    """Return the head dim of a tile, a power of two of at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


@functools.cache
def triton_unavailable() -> str | None:
    """Return why Triton cannot be imported, or None."""
    return None if importlib.util.find_spec("triton") else "needs Triton, which is not installed (pip install triton)"


def rows_at_once(repeat: int) -> int:
    """Return how many rows a tile of keys looks at together, a power of two."""
    return max(256, padded(FOLDED_ROWS_AT_ONCE // repeat + 1) // 2)


def unsupported_device(device: torch.device) -> str | None:
    """Return why the programs do not run on a device, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs CUDA tensors on an NVIDIA GPU, got {'an AMD GPU' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    return triton_unavailable()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, low: Tensor | None, high: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    from . import triton_kernels

    if scale < 0:  # the program takes the largest score before the factor
        q, scale = -q, -scale
    batch, heads, rows, dim = q.shape
    groups, keys = k.shape[1:3]
    tiles = _tiles(q).forward
    grid_rows = -(-rows * (heads // groups) // tiles.rows)
    parts = _parts(grid_rows * batch * groups, keys, q)
    o = q.new_empty(parts, batch, heads, rows, dim, dtype=torch.float32)
    lse = q.new_empty(parts, batch, heads, rows, dtype=torch.float32)
    with torch.cuda.device_of(q):
        triton_kernels.forward[grid_rows, batch * groups, parts](
            q, k, v, *_bounds(low, high, q), o, lse, scale, *q.stride(), *k.stride(), *v.stride(),
            _stride(low), batch, groups, rows, keys, parts, **_constants(q, k, low, tiles),
        )  # fmt: skip
    return (o[0], lse[0]) if parts == 1 else _merge_parts(o, lse)


def _merge_parts(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    from . import triton_kernels

    parts, dim = o.shape[0], o.shape[-1]
    merged = o.new_empty(o.shape[1:], dtype=torch.float32), lse.new_empty(lse.shape[1:])
    rows = merged[1].numel()
    with torch.cuda.device_of(o):
        triton_kernels.merge_parts[(-(-rows // ROWS_OF_MERGE),)](
            o, lse, *merged, rows, parts, D=dim, BLOCK_D=padded(dim), BLOCK_M=ROWS_OF_MERGE
        )
    return merged


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from . import triton_kernels

    batch, heads, rows, dim = q.shape
    groups, keys = k.shape[1:3]
    launch = _tiles(q)
    grid_rows = -(-rows * (heads // groups) // launch.dq.rows)
    parts = _parts(grid_rows * batch * groups, keys, q)
    dq = q.new_empty(parts, *q.shape, dtype=torch.float32)
    dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (k, v))
    inputs = do, q, k, v, *_bounds(low, high, q), lse, delta
    sizes = (scale, *do.stride(), *q.stride(), *k.stride(), *v.stride(), _stride(low), batch, groups, rows, keys)
    with torch.cuda.device_of(q):
        triton_kernels.backward_dq[grid_rows, batch * groups, parts](
            *inputs, dq, *sizes, parts, **_constants(q, k, low, launch.dq)
        )
        triton_kernels.backward_dk_dv[-(-keys // launch.dk_dv.keys), batch * groups](
            *inputs, dk, dv, *sizes, ROWS_AT_ONCE=rows_at_once(heads // groups), **_constants(q, k, low, launch.dk_dv)
        )
    return dq[0] if parts == 1 else dq.sum(0), dk, dv


def _merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    from . import triton_kernels

    batch, heads, rows, dim = o.shape
    with torch.cuda.device_of(o):
        triton_kernels.merge[(-(-batch * heads * rows // ROWS_OF_MERGE),)](
            o, lse, o_new, lse_new, *o.stride(), *lse.stride(), *o_new.stride(), *lse_new.stride(),
            batch * heads * rows, heads, rows, D=dim, BLOCK_D=padded(dim), BLOCK_M=ROWS_OF_MERGE,
        )  # fmt: skip


def _output_with_row_sums(do: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    from . import triton_kernels

    batch, heads, rows, dim = do.shape
    o = torch.empty(do.shape, dtype=dtype, device=do.device)
    with torch.cuda.device_of(do):
        triton_kernels.output_with_row_sums[(-(-batch * heads * rows // ROWS_OF_MERGE),)](
            do, delta.contiguous(), o, *do.stride(), batch * heads * rows, heads, rows, torch.finfo(dtype).max,
            D=dim, BLOCK_D=padded(dim), BLOCK_M=ROWS_OF_MERGE,
        )  # fmt: skip
    return o


def _tiles(q: Tensor) -> Launch:
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
    return launch_of(q.dtype, q.shape[3], capability)


def _parts(programs: int, keys: int, q: Tensor) -> int:
    """Return into how many parts the keys are split, given the number of programs without a split."""
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    return max(1, min(PARTS_PER_MULTIPROCESSOR * processors // programs, keys // KEYS_PER_PART))


def _bounds(low: Tensor | None, high: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors to point at; without intervals, the programs do not read them."""
    return (q, q) if low is None or high is None else (low, high)


def _stride(low: Tensor | None) -> int:
    return 0 if low is None or low.shape[0] == 1 else low.stride(0)


def constants(repeat: int, dim: int, dtype: torch.dtype, tiles: Tiles, *, masked: bool) -> dict[str, Any]:
    """Return what a program is compiled for: heads of a group, head dim, tiles, and whether there are intervals."""
    return {
        "REPEAT": repeat,
        "D": dim,
        "BLOCK_D": padded(dim),
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.keys,
        "MASKED": masked,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": True,
    }


def _constants(q: Tensor, k: Tensor, low: Tensor | None, tiles: Tiles) -> dict[str, Any]:
    return constants(q.shape[1] // k.shape[1], q.shape[3], q.dtype, tiles, masked=low is not None)


def _define(schema: str, function: Callable[..., Any], without_data: Callable[..., Any]) -> None:
    """Define an operator; `without_data` returns results of the same shapes and dtypes."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mllm_seqpar::{name}", without_data, lib=_library)


_library = torch.library.Library("mllm_seqpar", "DEF")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? low, Tensor? high"
_define(
    f"interval_attention({_INPUTS}, float scale) -> (Tensor, Tensor)",
    _forward,
    lambda q, *_: tuple(q.new_empty(shape, dtype=torch.float32) for shape in (q.shape, q.shape[:3])),
)
_define(
    f"interval_attention_backward(Tensor do, {_INPUTS}, Tensor lse, Tensor delta, float scale) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    lambda do, q, k, v, *_: tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v)),
)
_define(
    "merge_parts(Tensor o, Tensor lse) -> (Tensor, Tensor)",
    _merge_parts,
    lambda o, lse: (o.new_empty(o.shape[1:], dtype=torch.float32), lse.new_empty(lse.shape[1:])),
)
_define("merge_(Tensor(a!) o, Tensor(b!) lse, Tensor o_new, Tensor lse_new) -> ()", _merge_, lambda *_: None)
_define(
    "output_with_row_sums(Tensor do, Tensor delta, ScalarType dtype) -> Tensor",
    _output_with_row_sums,
    lambda do, delta, dtype: do.new_empty(do.shape, dtype=dtype),
)
