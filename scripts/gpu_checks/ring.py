"""The distributed algorithms with all ranks in one process on one device, against attention on one device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_checks.kernels import FLOAT32, ROUNDED_PARTIALS, Problem, errors
from gpu_checks.rows import Row
from torch import Tensor

from mllm_seqpar.attention import lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.loopback import run_loopback
from mllm_seqpar.errors import first_line
from mllm_seqpar.sharding import sequence_positions

RANKS = 4
SIZES = {
    "cuda": {"cross": (1, 28, 4, 512, 8192, 128), "causal": (1, 28, 4, 2048, 2048, 128)},
    "cpu": {"cross": (1, 4, 2, 16, 64, 16), "causal": (1, 4, 2, 32, 32, 16)},
}


def check(device: str) -> Iterator[Row]:
    """Yield errors and times of every algorithm, for cross-attention and for causal self-attention."""
    algorithms = [
        ("lv_xattn", "cross", lv_xattn),
        ("ring", "cross", ring_attention),
        ("ring", "causal", functools.partial(ring_attention, causal=True, layout="zigzag")),
        ("mesh 2x2", "cross", functools.partial(mesh_attention, tile=(2, 2))),
        ("ulysses", "cross", ulysses_attention),
        ("ulysses", "causal", functools.partial(ulysses_attention, causal=True)),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        yield from (compare(name, kind, dtype, device, attend) for name, kind, attend in algorithms)


def compare(name: str, kind: str, dtype: torch.dtype, device: str, attend: Callable[..., Any]) -> Row:
    """Run one algorithm on all ranks and compare o, dq, dk, dv with the float64 reference."""
    subject = f"{name} {kind}, {RANKS} ranks, {str(dtype).removeprefix('torch.')}"
    batch, heads, groups, rows, keys, dim = SIZES[device][kind]
    g = torch.Generator().manual_seed(1)
    sizes = [(heads, rows), (groups, keys), (groups, keys), (heads, rows)]
    q, k, v, do = (torch.randn(batch, h, s, dim, generator=g).to(device, dtype) for h, s in sizes)
    problem = Problem(q, k, v, do, kind == "causal", None)
    layout = "zigzag" if problem.causal else "contiguous"
    try:
        run(attend, problem, layout)  # the first call builds and loads kernels
        start = time.perf_counter()
        results = run(attend, problem, layout)
        seconds = time.perf_counter() - start
    except (RuntimeError, ValueError) as error:
        return Row("ring exact", subject, first_line(error), "", False)
    worst, tensor = max((error, tensor) for tensor, error in errors(problem, results).items())
    allowed, unit = (FLOAT32, "") if dtype == torch.float32 else (ROUNDED_PARTIALS, " x sdpa's error")
    found = f"{worst:.2g}{unit} ({tensor}); forward and backward {seconds * 1e3:.1f} ms"
    return Row("ring exact", subject, found, f"{allowed:g}{unit}", worst <= allowed)


def run(attend: Callable[..., Any], p: Problem, layout: str) -> dict[str, Tensor]:
    """Shard the inputs over the ranks, attend, and gather o, dq, dk, dv."""
    q_rows, k_rows = (
        [sequence_positions(x.shape[2], rank, RANKS, layout).to(x.device) for rank in range(RANKS)] for x in (p.q, p.k)
    )

    def on_rank(comm: Communicator) -> tuple[Tensor, ...]:
        rows, keys = q_rows[comm.rank], k_rows[comm.rank]
        leaves = [x.index_select(2, index).requires_grad_() for x, index in ((p.q, rows), (p.k, keys), (p.v, keys))]
        o = attend(*leaves, group=comm)
        return o.detach(), *torch.autograd.grad(o, leaves, p.do.index_select(2, rows))

    shards = run_loopback(RANKS, on_rank)
    if p.q.is_cuda:
        torch.cuda.synchronize()
    whole = {}
    for index, (name, like) in enumerate({"o": p.q, "dq": p.q, "dk": p.k, "dv": p.v}.items()):
        whole[name] = torch.empty_like(like)
        for rank, shard in enumerate(shards):
            whole[name].index_copy_(2, (q_rows if index < 2 else k_rows)[rank], shard[index].to(like.dtype))
    return whole
