"""All ranks of a group in one process on one device: the distributed algorithms against one softmax over everything."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
from gpu_checks.kernels import FLOAT32, SIXTEEN_BITS, Problem, framework_errors, reference, relative
from gpu_checks.rows import Row
from torch import Tensor

from mllm_seqpar.attention import lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.loopback import run_loopback
from mllm_seqpar.sharding import sequence_positions

RANKS = 4
SIZES = {
    "cuda": {"cross": (1, 28, 4, 512, 8192, 128), "causal": (1, 28, 4, 2048, 2048, 128)},
    "cpu": {"cross": (1, 4, 2, 16, 64, 16), "causal": (1, 4, 2, 32, 32, 16)},
}


def check_ring(device: str) -> Iterator[Row]:
    """Yield errors and times of every algorithm, over frames and causal."""
    for dtype in (torch.bfloat16, torch.float32):
        yield check("lv_xattn", "cross", dtype, device, lv_xattn)
        yield check("ring", "cross", dtype, device, ring_attention)
        yield check("ring", "causal", dtype, device, functools.partial(ring_attention, causal=True, layout="zigzag"))
        yield check("mesh 2x2", "cross", dtype, device, functools.partial(mesh_attention, tile=(2, 2)))
        yield check("ulysses", "cross", dtype, device, ulysses_attention)
        yield check("ulysses", "causal", dtype, device, functools.partial(ulysses_attention, causal=True))


def check(name: str, kind: str, dtype: torch.dtype, device: str, attend: Callable) -> Row:
    """Run one algorithm over all ranks and compare o, dq, dk, dv with one softmax."""
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
        got = run(attend, problem, layout)
        seconds = time.perf_counter() - start
    except (RuntimeError, ValueError) as error:
        return Row("ring exact", subject, str(error).splitlines()[0], "", False)
    exact = reference(problem)
    errors = {name: relative(x, exact[name]) for name, x in got.items()}
    if dtype != torch.float32:
        theirs = framework_errors(problem)
        errors = {name: errors[name] / theirs[name] for name in errors}
    worst = max(errors, key=lambda name: errors[name])
    allowed, unit = (FLOAT32, "") if dtype == torch.float32 else (SIXTEEN_BITS, " x sdpa's error")
    found = f"{errors[worst]:.2g}{unit} ({worst}); forward and backward {seconds * 1e3:.1f} ms"
    return Row("ring exact", subject, found, f"{allowed:g}{unit}", errors[worst] <= allowed)


def run(attend: Callable, p: Problem, layout: str) -> dict[str, Tensor]:
    """Give every rank its rows and keys, and put what comes back together again."""
    where_q = [sequence_positions(p.q.shape[2], rank, RANKS, layout).to(p.q.device) for rank in range(RANKS)]
    where_k = [sequence_positions(p.k.shape[2], rank, RANKS, layout).to(p.q.device) for rank in range(RANKS)]

    def on_rank(comm: Communicator) -> tuple[Tensor, ...]:
        rows, keys = where_q[comm.rank], where_k[comm.rank]
        leaves = [x.index_select(2, at).requires_grad_() for x, at in ((p.q, rows), (p.k, keys), (p.v, keys))]
        o = attend(*leaves, group=comm)
        return o.detach(), *torch.autograd.grad(o, leaves, p.do.index_select(2, rows))

    parts = run_loopback(RANKS, on_rank)
    if p.q.is_cuda:
        torch.cuda.synchronize()
    whole = {}
    for index, (name, like) in enumerate({"o": p.q, "dq": p.q, "dk": p.k, "dv": p.v}.items()):
        whole[name] = torch.empty_like(like)
        for rank, part in enumerate(parts):
            whole[name].index_copy_(2, (where_q if index < 2 else where_k)[rank], part[index].to(like.dtype))
    return whole
