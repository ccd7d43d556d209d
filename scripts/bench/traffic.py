"""Print the bytes that each strategy sends per layer, before and after two changes of the default, and bf16 errors.

    python scripts/bench/traffic.py [--ranks 2 6 8 16]      bytes, from formulas
    python scripts/bench/traffic.py --errors                errors against float64, computed on ranks in this process

The formulas are compared by tests with the bytes that the transport counts. "Before" is O in the backward pass instead
of delta = rowsum(dO * O), and every partial result in float32 (`accumulate_dtype=torch.float32`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mllm_seqpar.attention.call_spec import AccumulateDtype, accumulation, call_spec_for, problem_of
from mllm_seqpar.attention.joint import attend
from mllm_seqpar.attention.keys import GivenKeys
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.kernels import registry
from mllm_seqpar.kernels.base import output_with_row_sums
from mllm_seqpar.kernels.blocked_matmul import BlockedMatmulKernel
from mllm_seqpar.masks import FullBlockMasks
from mllm_seqpar.schedules.bytes_sent import (
    LSE_BYTES,
    Problem,
    expanded,
    lv_xattn_bytes,
    mesh_bytes,
    ring_bytes,
    ulysses_bytes,
    video_mme,
)

ROWS, KEYS, HEADS, KV_HEADS, DIM = 256, 4096, 8, 2, 64
"""The call of which errors are measured."""


def row(problem: Problem, *, backward: bool) -> str:
    """Return one line: MB per rank and layer of LV-XAttn and of both rings, and LV-XAttn's percentage of each ring."""
    formulas = ((lv_xattn_bytes, problem), (ring_bytes, problem), (ring_bytes, expanded(problem)))
    sent = [sum(formula(call, backward=backward).values()) for formula, call in formulas]
    cells = [*(f"{x / 1e6:,.1f}" for x in sent), *(f"{sent[0] / x:.2%}" for x in sent[1:])]
    return f"| {problem.ranks} | {'backward' if backward else 'forward'} | {' | '.join(cells)} |"


def strategies(n: int) -> Iterator[tuple[str, Callable[..., dict[str, int]]]]:
    """Yield the name and the formula of each strategy on n ranks."""
    yield "lv-xattn, ring", lv_xattn_bytes
    yield "lv-xattn, all pairs", partial(lv_xattn_bytes, direct=True)
    if n % 2 == 0 and n > 2:
        yield f"mesh {n // 2}x2", partial(mesh_bytes, mesh_shape=(n // 2, 2))
    if n % 4 == 0:
        yield f"ulysses 4 x tile {n // 4}x1", partial(ulysses_bytes, mesh_shape=(n // 4, 1))


def change(problem: Problem, formula: Callable[..., dict[str, int]], *, backward: bool) -> str:
    """Return the MB before and after, and their ratio."""
    after = sum(formula(replace(problem, straight=problem.element), backward=backward).values())
    before = formula(problem, backward=backward)
    if "delta" in before:  # O was sent instead
        before["o"] = before.pop("delta") // LSE_BYTES * problem.dim * problem.element
    total = sum(before.values())
    return f"{total / 1e6:,.1f} | {after / 1e6:,.1f} | {after / total:.2f}"


class _Rounding(BlockedMatmulKernel):
    """Takes and returns what fused CUDA kernels do: o and the results in the dtype of the inputs, and no delta."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        o, lse = super().forward(q, k, v, **options)
        return o.to(q.dtype), lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None, lse: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        delta = options.pop("delta")
        o = output_with_row_sums(do, delta, q.dtype) if o is None else o.to(q.dtype)
        dq, dk, dv = super().backward(do, q, k, v, o, lse, **options)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def inputs() -> tuple[Tensor, ...]:
    """Return q, k, v and do in bf16."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, ROWS), (KV_HEADS, KEYS), (KV_HEADS, KEYS), (HEADS, ROWS))
    return tuple(torch.randn(1, *size, DIM, generator=generator).bfloat16() for size in sizes)


def one_device(dtype: torch.dtype) -> list[Tensor]:
    """Return o, dq, dk and dv of torch's own attention in a dtype."""
    q, k, v, do = (x.to(dtype) for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = scaled_dot_product_attention(*leaves, enable_gqa=True)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def of_rank(comm: Communicator, kernel: str, accumulate: AccumulateDtype, all_pairs: bool) -> list[Tensor]:
    """Return this rank's part of o, dq, dk and dv of LV-XAttn."""
    q, k, v, do = (x.chunk(comm.size, dim=2)[comm.rank].contiguous() for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys = (k.shape[2],) * comm.size
    problem = problem_of(q.shape, k.shape, keys, q.dtype, accumulate)
    masks, dtype = FullBlockMasks(1, q.shape[2], keys), accumulation(accumulate, q.dtype)
    spec = call_spec_for("lv-xattn", None, masks, problem, dtype, all_pairs=all_pairs)
    o, _ = attend(leaves[0], [GivenKeys(spec, *leaves[1:])], comm=comm, scale=DIM**-0.5, kernel=kernel)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def print_errors(ranks: list[int]) -> None:
    exact = one_device(torch.float64)

    def errors(found: list[Tensor]) -> list[float]:
        return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]

    reference = errors(one_device(torch.bfloat16))
    registry._KERNELS["rounding"] = _Rounding
    print(
        f"\nErrors of bf16 LV-XAttn to float64: {ROWS} rows, {KEYS} keys, {HEADS} heads, {KV_HEADS} KV heads of {DIM}."
    )
    print("Relative to those of torch's attention in bf16 on one device: " + ", ".join(f"{x:.2e}" for x in reference))
    print("\n| kernel | ranks | results | O | dQ | dK | dV |\n|---|---:|---|---:|---:|---:|---:|")
    modes: list[tuple[str, AccumulateDtype, bool]] = [("ring, float32", torch.float32, False)]
    modes += [("all pairs, bf16", "auto", True), ("ring, bf16", None, False)]
    for kernel in ("blocked_matmul", "rounding"):
        for n in ranks:
            for name, accumulate, all_pairs in modes:
                parts = run_loopback(n, of_rank, kernel, accumulate, all_pairs)
                whole = [torch.cat(part, dim=2) for part in zip(*parts, strict=True)]
                cells = " | ".join(f"{x / y:.2f}" for x, y in zip(errors(whole), reference, strict=True))
                print(f"| {kernel} | {n} | {name} | {cells} |")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="default: 2 6 8 16; with --errors 2 8 16")
    parser.add_argument("--errors", action="store_true", help="also measure errors")
    options = parser.parse_args(argv)
    print("Video-MME of the paper: 5,514 query rows, 1,739,394 keys, 28 heads, 4 KV heads, head dim 128.")
    print("bf16 Q, K, V; float32 O, log-sum-exp, dQ, dK, dV. MB sent per rank and layer.\n")
    print("| ranks | pass | LV-XAttn | Ring, GQA | Ring, expanded heads | of Ring, GQA | of Ring, expanded |")
    print("|---|---|---|---|---|---|---|")
    ranks = options.ranks or [2, 6, 8, 16]
    for n in ranks:
        for backward in (False, True):
            print(row(video_mme(n), backward=backward))
    print('\nWith accumulate_dtype="auto", and as it was before: O in the backward pass, all results in float32.\n')
    print("| ranks | strategy | forward before | after | ratio | backward before | after | ratio |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for n in ranks:
        for name, formula in strategies(n):
            cells = (change(video_mme(n), formula, backward=backward) for backward in (False, True))
            print(f"| {n} | {name} | {' | '.join(cells)} |")
    if options.errors:
        print_errors(options.ranks or [2, 8, 16])


if __name__ == "__main__":
    main()
