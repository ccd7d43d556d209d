"""One kernel: errors against float64 beside those of `scaled_dot_product_attention`, and its speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu_checks.rows import Row
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import BlockKernel, choose_kernel, kernel_by_name

KINDS = ("plain", "causal", "masked")
SIZES = {"cuda": (2, 28, 4, 512, 2048, 128), "cpu": (2, 4, 2, 32, 128, 32)}
SPEED = {
    "cuda": [(1, 14, 2, 1024, 65536, 64), (1, 28, 4, 1024, 65536, 128), (1, 28, 4, 4096, 4096, 128)],
    "cpu": [(1, 4, 2, 32, 512, 32)],
}
FLOAT32 = 1e-5
SIXTEEN_BITS, FLOAT32_PARTIALS = 1.5, 1.1
"""Times the error of the framework's own attention: rounded partial results, and partial results in float32."""


@dataclass
class Problem:
    """Random q, k, v and gradient, scale, and how rows see keys; in 16-bit dtypes their exact values are known."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    causal: bool
    mask: Tensor | None

    @property
    def how(self) -> dict:
        """What forward and backward take beside the tensors."""
        return {"scale": self.q.shape[-1] ** -0.5, "causal": self.causal, "mask": self.mask}


def check_kernel(name: str, device: str) -> Iterator[Row]:
    """Yield the rows of one kernel: exactness by dtype, then speed by shape."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield exactness(name, dtype, device)
    for shape in SPEED[device]:
        yield from speed(name, shape, device)


def exactness(name: str, dtype: torch.dtype, device: str) -> Row:
    """Return the worst error over plain, causal and masked blocks, and over o, dq, dk, dv."""
    subject = f"{name} {str(dtype).removeprefix('torch.')}"
    worst, allowed, refusals, problems = (0.0, ""), 0.0, [], []
    for kind in KINDS:
        p = make(kind, dtype, device)
        kernel = kernel_by_name(name)
        obstacle = kernel.unsupported_reason(p.q, p.k, causal=p.causal, masked=p.mask is not None)
        if obstacle is not None:
            refusals.append(f"{kind}: {obstacle}")
            continue
        try:
            errors, allowed = errors_of(kernel, p)
        except (RuntimeError, AssertionError) as error:
            problems.append(f"{kind}: {str(error).splitlines()[0]}")
            continue
        worst = max(worst, *((value, f"{tensor}, {kind}") for tensor, value in errors.items()))
    if problems:
        return Row("kernel exact", subject, "; ".join(problems), "", False)
    if not worst[1]:
        return Row("kernel exact", subject, refusals[0].split(": ", 1)[1])
    unit = "" if dtype == torch.float32 else " x sdpa's error"
    found = f"{worst[0]:.2g}{unit} ({worst[1]})" + "".join(f"; {x}" for x in refusals)
    return Row("kernel exact", subject, found, f"{allowed:g}{unit}", worst[0] <= allowed)


def make(kind: str, dtype: torch.dtype, device: str) -> Problem:
    """Make a random problem. Some masked rows see nothing, others only keys of the second half."""
    batch, heads, groups, rows, keys, dim = SIZES[device]
    keys = rows if kind == "causal" else keys
    g = torch.Generator().manual_seed(0)

    def draw(h: int, s: int) -> Tensor:
        return torch.randn(batch, h, s, dim, generator=g).to(device, dtype)

    mask = None
    if kind == "masked":
        mask = torch.rand(batch, rows, keys, generator=g) < 0.5
        mask[:, ::7] = False
        mask[:, 1::7, : keys // 2] = False
        mask = mask.to(device)
    return Problem(draw(heads, rows), draw(groups, keys), draw(groups, keys), draw(heads, rows), kind == "causal", mask)


def errors_of(kernel: BlockKernel, p: Problem) -> tuple[dict[str, float], float]:
    """Return the errors of o, dq, dk, dv in the unit of the limit, and the limit.

    Unless causal, the keys are cut in two and the backward of each half is given the merged output: what ranks do.
    """
    exact = reference(p)
    mine, dtype = distributed(kernel, p), p.q.dtype
    for name, x in mine.items():
        assert x.isfinite().all(), f"{name} is not finite"
    errors = {name: relative(x.to(dtype), exact[name]) for name, x in mine.items()}
    if dtype == torch.float32:
        return errors, FLOAT32
    theirs = framework_errors(p)
    partials = kernel.forward(p.q[:, :, :1], p.k, p.v, scale=1.0)[0].dtype
    return {name: errors[name] / theirs[name] for name in errors}, (
        FLOAT32_PARTIALS if partials == torch.float32 else SIXTEEN_BITS
    )


def distributed(kernel: BlockKernel, p: Problem) -> dict[str, Tensor]:
    """Attend in two blocks of keys, merge, and differentiate both with the merged output."""
    from mllm_seqpar.kernels.merge import merge

    keys = p.k.shape[2]
    cuts = [slice(0, keys)] if p.causal else [slice(0, keys // 2), slice(keys // 2, keys)]
    blocks = []
    for s in cuts:
        how = p.how | {"mask": None if p.mask is None else p.mask[:, :, s]}
        blocks.append((p.k[:, :, s], p.v[:, :, s], how))
    parts = [kernel.forward(p.q, k, v, **how) for k, v, how in blocks]
    o, lse = parts[0][0].float(), parts[0][1]
    for part in parts[1:]:
        o, lse = merge((o, lse), part)
    grads = [kernel.backward(p.do, p.q, k, v, o, lse, **how) for k, v, how in blocks]
    dq = torch.stack([g[0].float() for g in grads]).sum(0)
    return {"o": o, "dq": dq, "dk": torch.cat([g[1] for g in grads], 2), "dv": torch.cat([g[2] for g in grads], 2)}


def reference(p: Problem) -> dict[str, Tensor]:
    """Return the exact o, dq, dk, dv in float64."""
    kernel = kernel_by_name("reference")
    q, k, v, do = (x.double() for x in (p.q, p.k, p.v, p.do))
    o, lse = kernel.forward(q, k, v, **p.how)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *kernel.backward(do, q, k, v, o, lse, **p.how)), strict=True))


def framework_errors(p: Problem) -> dict[str, float]:
    """Return the errors of one `scaled_dot_product_attention`; rows that see nothing, which it leaves open, see all."""
    mask = p.mask if p.mask is None else p.mask | ~p.mask.any(-1, keepdim=True)
    exact = reference(Problem(p.q, p.k, p.v, p.do, p.causal, mask))
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    bias = None if mask is None else mask.unsqueeze(1)
    o = F.scaled_dot_product_attention(*leaves, attn_mask=bias, is_causal=p.causal, enable_gqa=True)
    got = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, leaves, p.do)), strict=True))
    return {name: relative(x, exact[name]) for name, x in got.items()}


def relative(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact|."""
    return float((x.double() - exact).norm() / exact.norm())


def speed(name: str, shape: tuple[int, ...], device: str) -> Iterator[Row]:
    """Yield forward and backward of one shape in bf16 against the framework's own, or why there is none."""
    from measure import medians_ms

    from kernels import framework, ours

    batch, heads, groups, rows, keys, dim = shape
    sizes = [(heads, rows), (groups, keys), (groups, keys), (heads, rows)]
    q, k, v, do = (torch.randn(batch, h, s, dim, device=device).to(torch.bfloat16) for h, s in sizes)
    subject = f"{name} H{heads} G{groups} S{rows} T{keys} D{dim}"
    try:
        kernel, _ = choose_kernel(name, q, k, causal=False, masked=False)
        theirs, runs = framework(q, k, v, do, causal=False)
        problem, mine = ours(kernel, q, k, v, do, False, theirs)
    except ConfigError as error:
        yield Row("kernel speed", subject, str(error).split(": it ")[-1].split("; choose")[0])
        return
    except RuntimeError as error:
        yield Row("kernel speed", subject, str(error).splitlines()[0], "", False)
        return
    if problem:
        yield Row("kernel speed", subject, problem, "", False)
        return
    times = medians_ms(runs | mine, device, repeats=10)
    texts = []
    for direction, count in (("forward", 4), ("backward", 10)):
        ms = times[f"{name} {direction}"]
        teraflops = count * batch * heads * rows * keys * dim / ms / 1e9
        ratio = ms / times[f"sdpa {direction}"]
        texts.append(f"{direction} {ms:.2f} ms, {teraflops:.3g} TFLOP/s, {ratio:.2f} x sdpa")
    yield Row("kernel speed", subject, "; ".join(texts))
