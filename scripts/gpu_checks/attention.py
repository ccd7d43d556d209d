"""The distributed algorithms against attention on one device, whether transfers overlap, and the end of a lost group.

Every rank computes the same float64 reference and compares its own shard; the squared errors are summed over ranks.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_checks.common import Row, dtype_name, hidden_share, kernels_of, share_one_gpu
from gpu_checks.kernels import FLOAT32, ROUNDED_PARTIALS, Problem, reference, sdpa_errors
from harness import medians_ms
from kernels import operands
from torch import Tensor

from mllm_seqpar.attention import decode_attention, lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.masks import FrameMask, Intervals
from mllm_seqpar.sharding import frame_range, sequence_positions

LOOPBACK_RANKS = 4
HEADS = {"cuda": (32, 8, 128), "cpu": (4, 2, 16)}
"""Heads, KV heads and head dimension."""
LENGTHS = {"cuda": (64, 256), "cpu": (4, 5)}
"""Rows of half a rank, and tokens per frame. There are 2 n + 1 frames, so the ranks have different numbers of them."""
TIMED = {"cuda": (2048, 32768), "cpu": (32, 256)}
"""Rows and keys of a rank when overlap is timed."""
HIDDEN = 0.5
"""Part of the time of transfers that attention kernels must hide, where computation is long enough."""


Results = dict[str, tuple[Tensor, Tensor]]
"""By name: a tensor of this rank, and its exact values."""


@dataclass(frozen=True)
class Case:
    """An algorithm with the kind of its problem ("cross", "masked" or "causal"), or why it needs other ranks."""

    name: str
    kind: str
    attend: Callable[..., Any]
    impossible: str = ""


def cases(ranks: int, heads: int) -> list[Case]:
    """Return every algorithm, also the ones that do not allow this number of ranks, which say so."""
    side = next((a for a in range(2, ranks) if ranks % a == 0), 0)
    no_mesh = "" if side else f"needs a number of ranks with two factors, such as 4; there are {ranks}"
    no_heads = f"needs a number of ranks that divides {heads} heads; there are {ranks}" if heads % ranks else ""
    mesh = functools.partial(mesh_attention, tile=(side, ranks // side) if side else None)
    hybrid = functools.partial(ulysses_attention, tile=(side, 1))
    return [
        Case("lv_xattn", "cross", lv_xattn),
        Case("lv_xattn", "masked", lv_xattn),
        Case("ring", "cross", ring_attention),
        Case("ring zigzag", "causal", functools.partial(ring_attention, causal=True)),
        Case("mesh", "cross", mesh, no_mesh),
        Case("mesh zigzag", "causal", functools.partial(mesh, causal=True), no_mesh),
        Case("ulysses", "cross", ulysses_attention, no_heads),
        Case("ulysses", "causal", functools.partial(ulysses_attention, causal=True), no_heads),
        Case("hybrid", "masked", hybrid, no_mesh or (no_heads and f"needs {heads} heads that the ranks divide")),
    ]


def check_in_one_process(device: str) -> Iterator[Row]:
    """Yield errors of every algorithm forward and backward, and of decoding, with all ranks on one device."""
    n = LOOPBACK_RANKS
    return exact_rows("ring exact", n, torch.device(device), lambda on_rank: run_loopback(n, on_rank)[0])


def check_ranks(comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Yield errors of every algorithm forward and backward, of decoding, and the times with and without overlap."""
    yield from exact_rows("ranks exact", comm.size, device, lambda on_rank: on_rank(comm))
    yield from (overlap(name, comm, device) for name in ("lv_xattn", "ring"))


def exact_rows(
    check: str, ranks: int, device: torch.device, run: Callable[[Callable[[Communicator], Row]], Row]
) -> Iterator[Row]:
    """Yield a row per algorithm and dtype; `run` calls a function on all ranks and returns the row of the first one."""
    for dtype in (torch.bfloat16, torch.float32):
        problems = {kind: Reference.make(kind, dtype, ranks, device) for kind in ("cross", "masked", "causal")}
        subject = f"{ranks} ranks, {dtype_name(dtype)}"
        computed: dict[str, tuple[Reference, Callable[..., Results]]] = {}
        for case in cases(ranks, HEADS[device.type][0]):
            name = f"{case.name} {case.kind}, {subject}"
            if case.impossible:
                yield Row(check, name, f"not run: {case.impossible}")
                continue
            computed[name] = problems[case.kind], functools.partial(on_rank, case)
        computed |= {f"decode {kind}, {subject}": (problems[kind], decoded) for kind in ("cross", "masked")}
        for name, (ref, compute) in computed.items():
            yield run(functools.partial(exact_row, check, name, ref, compute))


@dataclass(frozen=True)
class Reference:
    """A problem with its float64 results and the errors of PyTorch's attention, and each row's visible frames."""

    problem: Problem
    exact: dict[str, Tensor]
    theirs: dict[str, float]
    frames: tuple[Tensor, Tensor] | None
    tokens: int
    total: int

    @classmethod
    def make(cls, kind: str, dtype: torch.dtype, ranks: int, device: torch.device) -> Reference:
        """Return a random problem, the same on every rank."""
        (heads, groups, dim), (half, tokens) = HEADS[device.type], LENGTHS[device.type]
        total, rows = 2 * ranks + 1, 2 * ranks * half
        keys = rows if kind == "causal" else total * tokens
        generator = torch.Generator().manual_seed(2)
        frames, intervals = None, Intervals.causal(rows) if kind == "causal" else None
        if kind == "masked":  # rows without frames, of one rank's frames only, and of all frames
            first = torch.randint(0, total, (1, rows), generator=generator)
            frames = first, (first + torch.randint(0, total, (1, rows), generator=generator)).clamp(max=total)
            intervals = Intervals(frames[0] * tokens, frames[1] * tokens, keys)
        sizes = 1, heads, groups, rows, keys, dim
        p = Problem(*(x.detach() for x in operands(sizes, device, dtype)), intervals)
        theirs = {} if dtype == torch.float32 else sdpa_errors(p)
        return cls(p, reference(p), theirs, frames, tokens, total)

    def shard(self, comm: Communicator) -> tuple[Tensor, Tensor]:
        """Return the positions of this rank's rows and keys."""
        causal = self.frames is None and self.problem.intervals is not None
        layout = "zigzag" if causal else "contiguous"
        rows = sequence_positions(self.problem.q.shape[2], comm.rank, comm.size, layout)
        own = frame_range(self.total, comm)
        keys = rows if causal else torch.arange(own.start * self.tokens, own.stop * self.tokens)
        return rows.to(self.problem.q.device), keys.to(self.problem.q.device)

    def mask(self, rows: Tensor) -> FrameMask | None:
        """Return the visible frames of these rows."""
        if self.frames is None:
            return None
        first, stop = (x[:, rows.cpu()] for x in self.frames)
        return FrameMask.from_intervals(first, stop, self.tokens, self.total)


def on_rank(case: Case, ref: Reference, comm: Communicator) -> Results:
    """Return o, dq, dk, dv of this rank's shard, each with the exact values."""
    (rows, keys), p = ref.shard(comm), ref.problem
    leaves = [x.index_select(2, index).requires_grad_() for x, index in ((p.q, rows), (p.k, keys), (p.v, keys))]
    given = {} if ref.frames is None else {"mask": ref.mask(rows)}
    o = case.attend(*leaves, group=comm, **given)
    found = (o.detach(), *torch.autograd.grad(o, leaves, p.do.index_select(2, rows)))
    indices = zip(("o", "dq", "dk", "dv"), (rows, rows, keys, keys), strict=True)
    return {name: (x, ref.exact[name].index_select(2, index)) for (name, index), x in zip(indices, found, strict=True)}


@torch.no_grad()
def decoded(ref: Reference, comm: Communicator) -> Results:
    """Return o of the first rows, which all ranks have, over the sharded keys, with the exact values."""
    (_, keys), p = ref.shard(comm), ref.problem
    rows = torch.arange(4, device=p.q.device)
    k, v = (x.index_select(2, keys) for x in (p.k, p.v))
    o = decode_attention(p.q[:, :, :4].contiguous(), k, v, group=comm, mask=ref.mask(rows))
    return {"o": (o, ref.exact["o"][:, :, :4])}


def exact_row(check: str, subject: str, ref: Reference, compute: Callable[..., Results], comm: Communicator) -> Row:
    """Return the row of the largest error over all ranks of what `compute(ref, comm)` returns."""
    found = compute(ref, comm)
    squares = [[float((x.double() - e).square().sum()), float(e.square().sum())] for x, e in found.values()]
    total = comm.all_reduce(torch.tensor(squares, dtype=torch.float64, device=comm.device))
    unit = "" if not ref.theirs else " x sdpa's error"
    limit = ROUNDED_PARTIALS if ref.theirs else FLOAT32
    relative = (total[:, 0] / total[:, 1]).sqrt().tolist()
    worst, name = max((x / ref.theirs.get(name, 1.0), name) for x, name in zip(relative, found, strict=True))
    return Row(check, subject, f"{worst:.2g}{unit} ({name})", f"{limit:g}{unit}", worst <= limit)


def overlap(name: str, comm: Communicator, device: torch.device) -> Row:
    """Return the times of a forward and backward pass with and without overlap, and how much of it is hidden."""
    attend: Any = {"lv_xattn": lv_xattn, "ring": ring_attention}[name]
    (heads, groups, dim), (rows, keys) = HEADS[device.type], TIMED[device.type]
    subject = f"{name}, {rows} rows and {keys} keys a rank"
    if device.type == "cuda" and share_one_gpu(comm):
        return Row("overlap", subject, "not measured: the ranks share one GPU, and times and overlap mean nothing")
    *leaves, do = operands((1, heads, groups, rows, keys, dim), device, torch.bfloat16)

    def step(on: bool) -> None:
        o = attend(*leaves, group=comm, overlap=on)
        torch.autograd.grad(o, leaves, do)

    runs = {"on": functools.partial(step, True), "off": functools.partial(step, False)}
    ms = medians_ms(runs, device.type, repeats=5)
    found = f"forward and backward {ms['on']:.2f} ms, without overlap {ms['off']:.2f} ms"
    if device.type == "cpu":
        return Row("overlap", subject, f"{found}; not measurable without CUDA kernels: the part that is hidden")
    shares = {key: hidden_share(kernels_of(run)) for key, run in runs.items()}
    found += f"; {shares['on']:.0%} of the time of transfers is hidden, without overlap {shares['off']:.0%}"
    return Row("overlap", subject, found, f"{HIDDEN:.0%} hidden", shares["on"] >= HIDDEN)


def check_lost_rank(comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Run passes until the group fails; the last rank kills itself in the third pass."""
    heads, groups, dim = HEADS[device.type]
    q, k, v = (torch.randn(1, h, 64, dim, device=device, requires_grad=True) for h in (heads, groups, groups))
    for number in range(1000):
        if number == 2 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        lv_xattn(q, k, v, group=comm).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
    yield Row("lost rank", "", "no rank was killed", "", False)
