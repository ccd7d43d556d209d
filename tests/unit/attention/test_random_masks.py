"""Layer: loopback ranks. A thousand random masks in float64 on 1 to 4 ranks, forward and backward, against dense
attention: windows, packed and padded text, tables with holes, empty rows, one row, odd lengths, unequal frames."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attention_cases import CONTROL
from dense_attention import dense_attention
from memory_meters import Peak
from mllm_seqpar.attention import call_spec, lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.attention.attend import attend
from mllm_seqpar.attention.call_spec import call_spec_for, problem_of
from mllm_seqpar.attention.keys import GivenKeys
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.masks.block_masks import text_masks
from mllm_seqpar.schedules.bytes_sent import lv_xattn_bytes, ring_bytes
from mllm_seqpar.schedules.mesh_shapes import parallel_spec
from mllm_seqpar.sharding import LAYOUTS, FrameSizes, padded_length, sequence_positions, take_spans
from selections import slow_unless

F64 = torch.float64


class Problem(NamedTuple):
    """Whole tensors, what each row attends to, and how they are computed."""

    x: dict[str, Tensor]
    visible: Tensor
    op: str
    mask: Any
    sizes: FrameSizes | None
    layout: str


def frame_problem(number: random.Random, g: torch.Generator, n: int) -> Problem:
    batch, rows, frames = number.choice((1, 2)), number.choice((1, 1, 2, 3, 5, 7)), number.randrange(1, 12)
    sizes = torch.randint(1, number.choice((2, 4, 12)), (frames,), generator=g)
    tokens: int | Tensor = sizes if number.random() < 0.6 else int(sizes[0])
    repeats, total, frame = torch.as_tensor(tokens).expand(frames), rows * n, torch.arange(frames)
    first, stop = torch.randint(0, frames + 1, (2, batch, total), generator=g)
    row, kind = torch.arange(total), number.choice(("random", "before", "window", "own", "holes", "sparse"))
    if kind in ("before", "window"):
        stop = (row * (frames + 1) // total).expand(batch, -1)
        first = (stop - 2).clamp(min=0) if kind == "window" else torch.zeros_like(stop)
    if kind == "own":
        first = row.remainder(frames).expand(batch, -1)
        stop = first + 1
    visible = (first[..., None] <= frame) & (frame < stop[..., None])
    if kind in ("holes", "sparse"):
        visible = torch.rand(batch, total, frames, generator=g) < (0.8 if kind == "holes" else 0.25)
        mask: Any = [FrameMask.from_dense(part, tokens) for part in visible.split(rows, 1)]
    else:
        pairs = zip(first.split(rows, 1), stop.split(rows, 1), strict=True)
        mask = [FrameMask.from_intervals(*pair, tokens, frames) for pair in pairs]
    heads, groups = number.choice(((2, 1), (4, 2), (4, 4)))
    keys = {"q": (batch, heads, total), "do": (batch, heads, total)}
    keys |= dict.fromkeys(("k", "v"), (number.choice((1, batch)), groups, int(repeats.sum())))
    x = {name: torch.randn(*shape, 4, dtype=F64, generator=g) for name, shape in keys.items()}
    op = number.choice(("lv", "ring", "mesh") + (("ulysses",) if heads % n == 0 else ()))
    return Problem(x, visible.repeat_interleave(repeats, -1), op, mask, FrameSizes(frames, tokens), "contiguous")


def text_problem(number: random.Random, g: torch.Generator, n: int) -> Problem:
    layout, batch = number.choice(LAYOUTS), number.choice((1, 2))
    total = padded_length(number.randrange(1, 26), n, layout)
    position, first, valid = torch.arange(total), None, None
    if number.random() < 0.4:
        first = (position - number.randrange(0, 5)).clamp(min=0)[None]
    if number.random() < 0.4:
        starts = torch.where(position < number.randrange(total), 0, number.randrange(total))
        starts = torch.minimum(starts, position)[None]
        first = starts if first is None else torch.maximum(first, starts)
    lengths = torch.randint(0, total + 1, (batch, 1), generator=g)
    padding = number.choice((None, "right", "left", "holes"))
    if padding == "holes":
        valid = torch.rand(batch, total, generator=g) < 0.7
    elif padding is not None:
        valid = position < lengths if padding == "right" else position >= lengths
    visible = (position <= position[:, None]).expand(batch, -1, -1)
    visible = visible if first is None else visible & (position >= first[..., None])
    visible = visible if valid is None else visible & valid[:, None]
    x = {name: torch.randn(batch, 2, total, 4, dtype=F64, generator=g) for name in ("q", "k", "v", "do")}
    ops = ("lv-xattn", "ring", "mesh") + (("ulysses",) if 2 % n == 0 else ())
    return Problem(x, visible, number.choice(ops), (first, valid), None, layout)


def run(comm: Communicator, problem: Problem) -> dict[str, Tensor]:
    x, n, layout = problem.x, comm.size, problem.layout
    total = x["q"].shape[2]
    rows = sequence_positions(total, comm.rank, n, layout)
    keys = ((0, 0),) if problem.sizes is None else problem.sizes.units(problem.sizes.spans(n)[comm.rank])
    own = {name: x[name][:, :, rows] for name in ("q", "do")}
    own |= {name: x[name][:, :, rows] if problem.sizes is None else take_spans(x[name], keys, 2) for name in ("k", "v")}
    q, k, v = (own[name].clone().requires_grad_() for name in ("q", "k", "v"))
    if problem.sizes is not None:
        function: Any = {"lv": lv_xattn, "ring": ring_attention, "mesh": mesh_attention, "ulysses": ulysses_attention}
        o, lse = function[problem.op](q, k, v, mask=problem.mask[comm.rank], group=comm, return_lse=True)
    else:
        masks = text_masks([sequence_positions(total, rank, n, layout) for rank in range(n)], *problem.mask)
        sizes = problem_of(q.shape, k.shape, (total // n,) * n, F64, "auto")
        spec = call_spec_for(parallel_spec(problem.op, None, sizes), masks, sizes, F64)
        ((o, lse),) = attend(q, [[GivenKeys(spec, k, v)]], rows="sharded", comm=comm, scale=0.5)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), own["do"])
    return {"o": o.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def check(problem: Problem, found: list[dict[str, Tensor]]) -> None:
    x, n = problem.x, len(found)
    leaves = [x[name].clone().requires_grad_() for name in ("q", "k", "v")]
    o, lse = dense_attention(*leaves, problem.visible, 0.5)
    exact = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, x["do"]), strict=True)) | {"o": o, "lse": lse}
    rows = [sequence_positions(x["q"].shape[2], rank, n, problem.layout) for rank in range(n)]
    keys = (
        rows
        if problem.sizes is None
        else [
            torch.cat([torch.arange(*span) for span in problem.sizes.units(spans)] or [torch.arange(0)])
            for spans in problem.sizes.spans(n)
        ]
    )
    for name, right in exact.items():
        for result, index in zip(found, keys if name in ("dk", "dv") else rows, strict=True):
            torch.testing.assert_close(result[name], right.detach()[:, :, index], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("n", "part"), slow_unless(lambda row: row == (3, 0), itertools.product((1, 2, 3, 4), range(5)))
)
def test_random_masks_are_exact(n: int, part: int) -> None:
    problems = []
    for seed in range(50 * part, 50 * part + 50):
        number, g = random.Random(f"{n} {seed}"), torch.Generator().manual_seed(4 * seed + n)
        problems.append((text_problem if seed % 3 == 0 else frame_problem)(number, g, n))
    found = run_loopback(n, lambda comm: [run(comm, problem) for problem in problems])
    for number, problem in enumerate(problems):
        check(problem, [of_rank[number] for of_rank in found])
    again = run_loopback(n, lambda comm: [run(comm, problem) for problem in problems[:20]])
    for first, second in zip(found, again, strict=True):
        assert all(torch.equal(a[name], b[name]) for a, b in zip(first[:20], second, strict=True) for name in a)


@pytest.mark.parametrize("n", [2, 4])
def test_blocks_with_many_keys_are_differentiated_in_parts(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_spec, "GRADIENT_BYTES", 2 * 3 * 2 * 4 * 8)  # 3 keys of 2 heads of 4 in float64
    problems = [
        (text_problem if seed % 3 == 0 else frame_problem)(
            random.Random(f"{n} {seed}"), torch.Generator().manual_seed(seed), n
        )
        for seed in range(20)
    ]
    found = run_loopback(n, lambda comm: [run(comm, problem) for problem in problems])
    for number, problem in enumerate(problems):
        check(problem, [of_rank[number] for of_rank in found])


def test_sums_of_key_gradients_exist_once_beside_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, row = 4096, 2 * 2 * 4 * 8  # bytes of dk and dv of a key
    monkeypatch.setattr(call_spec, "GRADIENT_BYTES", keys // 16 * row)

    def peak(comm: Communicator) -> int:
        q, k, v = (torch.randn(1, 2, count, 4, dtype=F64).requires_grad_() for count in (2, keys, keys))
        o = lv_xattn(q, k, v, group=comm)
        with Peak(q, k, v, o) as meter:
            torch.autograd.grad(o.sum(), (q, k, v))
        return meter.bytes

    assert max(run_loopback(3, peak)) <= 1.5 * keys * row


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("attention", "formula"), [(lv_xattn, lv_xattn_bytes), (ring_attention, ring_bytes)])
def test_bytes_sent_with_unequal_frames_equal_the_formulas(attention: Any, formula: Any, n: int) -> None:
    counts = torch.tensor([3, 1, 40, 1, 5, 9, 2, 7, 7, 1])
    sizes, rows = FrameSizes(len(counts), counts), 6
    lengths = tuple(sizes.count(spans) for spans in sizes.spans(n))
    assert len(set(lengths)) > 1

    def run(comm: Communicator) -> list[tuple[int, int]]:
        q = torch.randn(2, 4, rows, 8).requires_grad_()
        k, v = (torch.randn(2, 2, lengths[comm.rank], 8).requires_grad_() for _ in range(2))
        stop = torch.full((2, rows), len(counts))
        mask = FrameMask.from_intervals(torch.zeros_like(stop), stop, counts, len(counts))

        def payload() -> int:
            return sum(size for label, size in comm.bytes.sent.items() if label not in CONTROL)

        o = attention(q, k, v, group=comm, mask=mask)
        forward = payload()
        o.sum().backward()
        found = [forward, payload() - forward]
        shape = problem_of(q.shape, k.shape, lengths, q.dtype, "auto")
        return [
            (bytes_sent, sum(formula(replace(shape, rank=comm.rank), backward=backward).values()))
            for backward, bytes_sent in zip((False, True), found, strict=True)
        ]

    for rank in run_loopback(n, run):
        assert all(sent == expected for sent, expected in rank)
