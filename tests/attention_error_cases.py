"""Calls of the attention functions in which one rank passes something else than the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.attention import lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import Communicator
from mllm_seqpar.masks import FrameMask


def qkv(rows: int = 4, keys: int = 6, heads: int = 4, groups: int = 2, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    k = torch.randn(batch, groups, keys, 8)
    return torch.randn(batch, heads, rows, 8), k, k.clone()


def everything(rows: int, frames: int) -> FrameMask:
    return FrameMask.from_dense(torch.ones(2, rows, frames, dtype=torch.bool), 3)


def odd_one_out(comm: Communicator, what: str) -> Any:
    """All ranks but the last agree."""
    odd = comm.rank == comm.size - 1
    x = qkv(keys=3 if "mask" in what else 6)
    mask = everything(4, comm.size)
    options: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.5 if odd else None},
        "accumulate_dtype": {"accumulate_dtype": None if odd else torch.float32},
        "mask missing": {"mask": None if odd else mask},
        "mask form": {"mask": FrameMask.from_intervals(*torch.zeros(2, 2, 4).long(), 3, comm.size) if odd else mask},
        "mask frames": {"mask": everything(4, comm.size * 3) if odd else mask},
        "kernel": {"kernel": "none" if odd else "auto"},
    }
    match what:
        case "rows" if odd:
            x = qkv(rows=5)
        case "heads" if odd:
            x = qkv(heads=8)
        case "batch" if odd:
            x = qkv(batch=3)
        case "dtype" if odd:
            x = tuple(t.bfloat16() for t in x)
        case "bad shape" if odd:
            x = (x[0], x[1], x[2][:, :, :2])
        case "strategy" if odd:
            return ring_attention(*x, group=comm)
        case "tile":
            return mesh_attention(*x, group=comm, tile=(3, 1) if odd else (1, 3))
        case "tile of other ranks" if odd:
            return mesh_attention(*x, group=comm, tile=(2, 2))
        case "heads that cannot be dealt" if odd:
            return ulysses_attention(*x, group=comm)
        case "layout":
            return ring_attention(*qkv(4, 4), group=comm, causal=True, layout="striped" if odd else "zigzag")
        case "causal" if odd:
            return ring_attention(*qkv(6, 6), group=comm, causal=True)
        case "causal":
            return ring_attention(*qkv(6, 6), group=comm)
    return lv_xattn(*x, group=comm, **options.get(what, {}))


def caught(comm: Communicator, what: str) -> Exception:
    try:
        odd_one_out(comm, what)
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return error
    return AssertionError("nothing was raised")
