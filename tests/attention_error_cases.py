"""Calls of the attention functions in which one rank passes something else than the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.attention import decode_attention, lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.masks import FrameMask


def qkv(rows: int = 4, keys: int = 6, heads: int = 4, groups: int = 2, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    k = torch.randn(batch, groups, keys, 8)
    return torch.randn(batch, heads, rows, 8), k, k.clone()


def everything(rows: int, frames: int) -> FrameMask:
    return FrameMask.from_dense(torch.ones(2, rows, frames, dtype=torch.bool), 3)


def odd_one_out(comm: Communicator, what: str) -> Any:
    """All ranks but the last agree."""
    odd = comm.rank == comm.size - 1
    x, function, options = qkv(keys=3 if "mask" in what else 6), lv_xattn, {}
    mask = everything(4, comm.size)
    unequal = FrameMask.from_intervals(*torch.zeros(2, 2, 4).long(), torch.tensor([2, 4, 3]), comm.size)
    match what:
        case "rows" | "heads" | "batch" if odd:
            x = qkv(**{what: {"rows": 5, "heads": 8, "batch": 3}[what]})
        case "shared keys" if odd:
            x = (x[0], x[1][:1], x[2][:1])
        case "dtype" if odd:
            x = tuple(t.bfloat16() for t in x)
        case "bad shape" if odd:
            x = (x[0], x[1], x[2][:, :, :2])
        case "scale" | "kernel" | "accumulate_dtype" if odd:
            options = {what: {"scale": 0.5, "kernel": "none"}.get(what)}
        case "mask missing" | "mask sizes" | "mask frames":
            options["mask"] = {"mask sizes": unequal, "mask frames": everything(4, 9)}.get(what) if odd else mask
        case "decoding rows" | "decoding gradients":
            x, function = (qkv(5) if odd and "rows" in what else x), decode_attention
            x[0].requires_grad_(odd and "gradients" in what)
        case "decoding" if odd:
            function = decode_attention
        case "strategy" if odd:
            function = ring_attention
        case "tile":
            function, options = mesh_attention, {"tile": (3, 1) if odd else (1, 3)}
        case "tile of other ranks" if odd:
            function, options = mesh_attention, {"tile": (2, 2)}
        case "heads that cannot be sharded" if odd:
            function = ulysses_attention
        case "layout":
            x, function = qkv(4, 4), ring_attention
            options = {"causal": True, "layout": "striped" if odd else "zigzag"}
        case "causal":
            x, function, options = qkv(6, 6), ring_attention, {"causal": odd}
    return function(*x, group=comm, **options)


def caught(comm: Communicator, what: str) -> Exception:
    return attempt(lambda: odd_one_out(comm, what))[1] or AssertionError("nothing was raised")
