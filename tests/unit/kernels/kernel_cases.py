"""Random blocks, their dense float64 attention, and the kernels to run them on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dense_attention import dense_attention, squared_terms
from mllm_seqpar.kernels import available_kernels, kernel_by_name
from mllm_seqpar.kernels.base import BlockKernel, FinalRows, merge_
from mllm_seqpar.masks import Intervals
from tolerances import EXACT, relative_error

CPU_KERNELS = ["blocked_matmul", "torch_cpu"]
CUDA = torch.cuda.is_available()  # without one, the first CUDA kernel shows in the summary that tests were skipped
CUDA_KERNELS = ["blocked_matmul", "cuda_flash", "cuda_cudnn", "triton_intervals", "cuda_efficient"]
CUDA_KERNELS += ["flash_attn", "flash_attn_3", "flash_attn_4"]
KINDS = {"plain": {}, "causal": {"causal": True, "keys": 33}, "masked": {"masked": True}}

on_every_kernel = pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in CPU_KERNELS]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in CUDA_KERNELS[: None if CUDA else 1]],
)


@dataclass
class Block:
    """One block, the gradient of its output, and the keys that its rows attend to."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    intervals: Intervals | None = None
    scale: float | None = None

    @property
    def options(self) -> dict:
        """The keyword arguments of forward and backward."""
        return {"scale": self.q.shape[-1] ** -0.5 if self.scale is None else self.scale, "intervals": self.intervals}

    def part(self, start: int, stop: int) -> Block:
        """Return the block of some of the keys."""
        part = None if self.intervals is None else self.intervals.part(keys=(start, stop))
        k, v = (x[:, :, start:stop] for x in (self.k, self.v))
        return replace(self, k=k, v=v, intervals=None if part and part.is_full else part)


def block(
    *, batch=2, heads=4, groups=2, rows=33, keys=70, dim=16, size=1.0, causal=False, masked=False, **options: Any
) -> Block:
    """Return a random block of the `device` and `dtype`; the numbers are drawn on CPU, so they are the same on each."""
    device, dtype = options.get("device", "cpu"), options.get("dtype", torch.float32)
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=g)).to(device, dtype)

    q, do = normal(batch, heads, rows, dim, size=size), normal(batch, heads, rows, dim)
    k, v = normal(batch, groups, keys, dim), normal(batch, groups, keys, dim)
    intervals = Intervals.causal(rows) if causal and rows > 1 else None
    if masked:
        low, high = torch.randint(-keys // 4, 5 * keys // 4 + 1, (2, batch, rows), generator=g).sort(0).values
        high[:, ::5] = 0
        intervals = Intervals(low, high, keys)
    return Block(q, k, v, do, intervals)


def kernel_for(name: str, b: Block) -> BlockKernel:
    """Return the kernel; skip the test if it is not available here or cannot compute this block."""
    if name not in available_kernels():
        pytest.skip(f"{name} is not available here")
    kernel = kernel_by_name(name)
    reason = kernel.unsupported_reason(b.q, b.k, b.intervals)
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    return kernel


class Results(NamedTuple):
    """Attention of a block and its gradients."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def visible_keys(b: Block) -> Tensor:
    """Return (B or 1, rows, keys) bool."""
    if b.intervals is None:
        return torch.ones(1, b.q.shape[2], b.k.shape[2], dtype=torch.bool, device=b.q.device)
    return b.intervals.expand(b.q.device, slice(None), slice(None), slice(0, b.k.shape[2]))


def sizes_of_terms(b: Block) -> dict[str, Tensor]:
    """Return the size of the terms that o, lse, dq, dk and dv of a block are sums of."""
    terms = squared_terms(b.q, b.k, b.v, b.do, visible_keys(b), b.options["scale"])
    return {name: x.sum().sqrt() for name, x in terms.items()}


def dense(b: Block) -> Results:
    """Compute the block in float64 with an ordinary softmax and autograd, independently of every kernel."""
    q, k, v = (x.detach().double().requires_grad_() for x in (b.q, b.k, b.v))
    o, lse = dense_attention(q, k, v, visible_keys(b), b.options["scale"])
    return Results(o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), b.do.double()))


def run(kernel: BlockKernel, b: Block, *, of_delta: bool = False) -> Results:
    """Return the results of a kernel; `of_delta`: backward gets delta instead of o."""
    o, lse = kernel.forward(b.q, b.k, b.v, **b.options)
    rows = FinalRows(b.q, o, lse, b.do)
    rows = rows.with_delta()._replace(o=None) if of_delta else rows
    return Results(o, lse, *kernel.backward(rows, b.k, b.v, **b.options))


def run_split(kernel: BlockKernel, b: Block, *cuts: int) -> Results:
    """Split the keys, merge the outputs, and pass the merged o and lse to the backward of each part."""
    edges = [0, *cuts, b.k.shape[2]]
    parts = [b.part(i, j) for i, j in itertools.pairwise(edges)]
    wide = torch.float64 if b.q.dtype == torch.float64 else torch.float32
    o = torch.zeros(b.q.shape, dtype=wide, device=b.q.device)
    lse = torch.full(b.q.shape[:3], -torch.inf, dtype=wide, device=b.q.device)
    for part in parts:
        merge_(o, lse, *kernel.forward(part.q, part.k, part.v, **part.options))
    grads = [kernel.backward(FinalRows(b.q, o, lse, b.do), part.k, part.v, **part.options) for part in parts]
    dq = torch.stack([grad[0].to(wide) for grad in grads]).sum(0)
    return Results(o, lse, dq, *(torch.cat([grad[i] for grad in grads], dim=2) for i in (1, 2)))


def check(found: Results, b: Block) -> None:
    exact, terms, bound = dense(b), sizes_of_terms(b), EXACT[b.q.dtype]
    assert found.lse.dtype == (torch.float64 if b.q.dtype == torch.float64 else torch.float32)
    assert found.lse.is_contiguous() and found.lse.shape == b.q.shape[:3] and found.o.shape == b.q.shape
    hidden = exact.lse == -torch.inf
    assert torch.equal(found.lse == -torch.inf, hidden)
    assert not found.o[hidden].any() and not found.dq[hidden].any()
    assert relative_error(found.lse[~hidden], exact.lse[~hidden], terms["lse"]) <= min(bound, 1e-3)
    for name, value, right in zip(Results._fields, found, exact, strict=True):
        assert name == "lse" or (value.isfinite().all() and relative_error(value, right, terms[name]) <= bound), name
