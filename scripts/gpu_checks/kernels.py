"""On one GPU: the errors and the speed of each kernel against `scaled_dot_product_attention`, and what "auto" takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_checks.common import FEW, Row, build, dtype_name, host_synchronisations, inputs, relative
from kernels import measure_shape, operands  # of scripts/bench
from torch import Tensor
from torch.nn import functional as F

from dense_attention import dense_attention
from mllm_seqpar import patch_model
from mllm_seqpar.errors import first_line
from mllm_seqpar.kernels import BlockKernel, FinalRows, choose_kernel, kernel_by_name, kernel_names
from mllm_seqpar.kernels.base import merge
from mllm_seqpar.masks import Intervals

KINDS = ("plain", "causal", "masked")
FEW_ROWS = ("few rows", "few rows, masked")
DIMS = {"triton_intervals": (64, 80, 256), "cuda_cudnn": (64, 96)}
"""Further head dims of kernels, in bf16: of masked blocks, or of plain ones if they take no mask."""
SIZES = {"cuda": (2, 28, 4, 512, 2048, 128), "cpu": (2, 4, 2, 32, 128, 32)}
SPEED = {
    "cuda": [(1, 14, 2, 1024, 65536, 64), (1, 28, 4, 1024, 65536, 128), (1, 28, 4, 4096, 4096, 128)],
    "cpu": [(1, 4, 2, 32, 512, 32)],
}
FLOAT32 = 1e-5
ROUNDED_PARTIALS, FLOAT32_PARTIALS = 1.5, 1.1
"""Limits in 16-bit dtypes, as multiples of the error of PyTorch's attention, by the dtype of partial results."""
SYNCHRONISATIONS = 2
"""Host synchronisations that a forward pass may have, all of them outside of layers."""
IMPLEMENTATIONS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""The packages of the versions that can be activated in torch's flash operators."""
VERSION_2 = ("flash_attn", "cuda_flash")
"""The kernels that compute with FlashAttention 2; PyTorch's is 3 or 4 where the user has activated that."""


@dataclass
class Problem:
    """Random q, k, v and do, and the visibility. The float64 reference starts from the rounded 16-bit values."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    intervals: Intervals | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.q.shape[-1] ** -0.5, "intervals": self.intervals}

    @property
    def visible(self) -> Tensor:
        """(B or 1, rows, keys) bool."""
        if self.intervals is None:
            return torch.ones(1, self.q.shape[2], self.k.shape[2], dtype=torch.bool, device=self.q.device)
        return self.intervals.expand(self.q.device, slice(None), slice(None), slice(0, self.k.shape[2]))


def check_kernel(name: str, device: str) -> Iterator[Row]:
    """Yield the rows of one kernel: exactness for each dtype, then speed for each shape.

    "cuda_flash@FA3" activates that implementation in torch first, in this process.
    """
    name, _, implementation = name.partition("@")
    if implementation:
        try:
            torch.nn.attention.activate_flash_attention_impl(implementation)
        except Exception as error:  # noqa: BLE001 - of a package that is not installed, or does not fit
            yield Row("kernel exact", f"{name}, {implementation}", f"not activated: {first_line(error)}")
            return
    yield from (exactness(name, dtype, device) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    yield from (speed(name, shape, device) for shape in SPEED[device])


def exactness(name: str, dtype: torch.dtype, device: str) -> Row:
    """Return the largest error over the kinds of blocks and further head dims, and over o, dq, dk, dv."""
    subject = f"{name} {dtype_name(dtype)}"
    worst, allowed, refusals, problems = (0.0, ""), 0.0, [], []
    kernel, further = kernel_by_name(name), "masked" if name == "triton_intervals" else "plain"
    cases: list[tuple[str, str, int | None]] = [(kind, kind, None) for kind in KINDS + FEW_ROWS]
    if dtype == torch.bfloat16:
        cases += [(f"{further}, head dim {dim}", further, dim) for dim in DIMS.get(name, ())]
    elif (
        name == "triton_intervals"
    ):  # each program takes seconds to compile, and this one differs by the dtype and a mask only
        cases = [case for case in cases if "masked" in case[0]]
    for title, kind, dim in cases:
        p = make(kind, dtype, device, dim)
        reason = kernel.unsupported_reason(p.q, p.k, p.intervals)
        if reason is not None:
            refusals.append(f"{title}: {reason}")
            continue
        try:
            found, allowed = errors_of(kernel, p)
        except Exception as error:  # noqa: BLE001 - compilers of kernels have errors of their own
            problems.append(f"{title}: {first_line(error)}")
            continue
        worst = max(worst, *((value, f"{tensor}, {title}") for tensor, value in found.items()))
    if problems:
        return Row("kernel exact", subject, "; ".join(problems), "", False)
    if not worst[1]:
        return Row("kernel exact", subject, refusals[0].split(": ", 1)[1])
    unit = "" if dtype == torch.float32 else " x sdpa's error"
    text = "; ".join([f"{worst[0]:.2g}{unit} ({worst[1]})", *refusals])
    return Row("kernel exact", subject, text, f"{allowed:g}{unit}", worst[0] <= allowed)


def make(kind: str, dtype: torch.dtype, device: str, dim: int | None = None) -> Problem:
    """Return a random problem. Of the masked rows, some see no key and others only keys of the second half."""
    batch, heads, groups, rows, keys, default_dim = SIZES[device]
    dim = dim or default_dim
    keys = rows if kind == "causal" else keys
    if kind.startswith("few rows"):  # of one item, for which kernels divide the keys
        batch, rows, keys = 1, rows // 16, 4 * keys
    intervals = Intervals.causal(rows) if kind == "causal" else None
    if kind.endswith("masked"):
        generator = torch.Generator().manual_seed(0)
        low, high = torch.randint(0, keys + 1, (2, batch, rows), generator=generator).sort(0).values
        high[:, ::7] = 0
        low[:, 1::7], high[:, 1::7] = keys // 2, keys
        intervals = Intervals(low, high, keys)
    sizes = batch, heads, groups, rows, keys, dim
    return Problem(*(x.detach() for x in operands(sizes, device, dtype)), intervals)


def errors_of(kernel: BlockKernel, p: Problem) -> tuple[dict[str, float], float]:
    """Return the errors of o, dq, dk, dv in the unit of the limit, and the limit."""
    found = in_two_blocks(kernel, p)
    for name, x in found.items():
        assert x.isfinite().all(), f"{name} is not finite"
    if p.q.dtype == torch.float32:
        return errors(p, found), FLOAT32
    exact = kernel.name != "cuda_cudnn" and kernel.forward(p.q[:, :, :1], p.k, p.v, scale=1.0)[0].dtype == torch.float32
    return errors(p, found), FLOAT32_PARTIALS if exact else ROUNDED_PARTIALS


def errors(p: Problem, found: dict[str, Tensor]) -> dict[str, float]:
    """Return the errors against float64; in 16-bit dtypes, as multiples of those of PyTorch's attention."""
    exact = reference(p)
    absolute = {name: relative(x.to(p.q.dtype), exact[name]) for name, x in found.items()}
    if p.q.dtype == torch.float32:
        return absolute
    theirs = sdpa_errors(p)
    return {name: error / theirs[name] for name, error in absolute.items()}


def in_two_blocks(kernel: BlockKernel, p: Problem) -> dict[str, Tensor]:
    """Return o, dq, dk, dv as two ranks compute them: in two key blocks (causal: one), merged output in backward."""
    keys = p.k.shape[2]
    causal = p.intervals is not None and p.intervals.is_causal
    blocks = []
    for start, stop in [(0, keys)] if causal else [(0, keys // 2), (keys // 2, keys)]:
        part = None if p.intervals is None else p.intervals.part(keys=(start, stop))
        blocks.append((p.k[:, :, start:stop], p.v[:, :, start:stop], p.options | {"intervals": part}))
    parts = [kernel.forward(p.q, k, v, **options) for k, v, options in blocks]
    o, lse = parts[0][0].float(), parts[0][1]
    for part in parts[1:]:
        o, lse = merge((o, lse), part)
    rows = FinalRows(p.q, o, lse, p.do)
    grads = [kernel.backward(rows, k, v, **options) for k, v, options in blocks]
    dq = torch.stack([g[0].float() for g in grads]).sum(0)
    return {"o": o, "dq": dq, "dk": torch.cat([g[1] for g in grads], 2), "dv": torch.cat([g[2] for g in grads], 2)}


def reference(p: Problem) -> dict[str, Tensor]:
    """Return o, dq, dk, dv in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (p.q, p.k, p.v)]
    o, _ = dense_attention(*leaves, p.visible, p.options["scale"])
    grads = torch.autograd.grad(o, leaves, p.do.double())
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True))


def sdpa_errors(p: Problem) -> dict[str, float]:
    """Return the errors of one `scaled_dot_product_attention`."""
    # Rows without a visible key see all keys here, because PyTorch does not define their result.
    causal, intervals = p.intervals is not None and p.intervals.is_causal, p.intervals
    if intervals is not None:
        empty = intervals.high <= intervals.low
        intervals = Intervals(intervals.low, intervals.high.masked_fill(empty, p.k.shape[2]), p.k.shape[2])
    shown = Problem(p.q, p.k, p.v, p.do, intervals)
    exact = reference(shown)
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    mask = None if causal or intervals is None else shown.visible.unsqueeze(1)
    o = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=causal, enable_gqa=True)
    results = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, leaves, p.do)), strict=True))
    return {name: relative(x, exact[name]) for name, x in results.items()}


def speed(name: str, shape: tuple[int, ...], device: str) -> Row:
    """Return the times of one shape in bf16 relative to PyTorch's attention, or why the kernel was not timed."""
    _, heads, groups, rows, keys, dim = shape
    subject = f"{name} H{heads} G{groups} S{rows} T{keys} D{dim}"
    try:
        row = measure_shape(shape, "bfloat16", device, [name], causal=False, repeats=10)[1]
    except RuntimeError as error:  # also of PyTorch's own attention, such as a lack of memory
        row = {"problem": first_line(error), "wrong": True}
    if "problem" in row:
        reason = row["problem"].split(": it ")[-1].split("; choose")[0]
        return Row("kernel speed", subject, reason, "", False if "wrong" in row else None)
    texts = [
        f"{direction} {row[f'{direction}_ms']:.2f} ms, {row[f'{direction}_tflops']:.3g} TFLOP/s, "
        f"{row[f'{direction}_ratio']:.2f} x sdpa"
        for direction in ("forward", "backward")
    ]
    return Row("kernel speed", subject, "; ".join(texts))


def check_one_gpu(device: str) -> Iterator[Row]:
    """Yield the kernels of "auto", and the synchronisations of a forward pass."""
    yield from (auto_kernel(device, kind) for kind in KINDS)
    model = build(device)
    given = inputs(model, *FEW, encoded=True)
    patch_model(model)
    yield synchronisations(lambda: model(**given, use_cache=False), device, "patched model, 1 rank")


def auto_kernel(device: str, kind: str = "plain") -> Row:
    """Return the row of the kernel that "auto" takes in bf16; FlashAttention 2 fails on Hopper if 3 or 4 is there."""
    _, heads, groups, _, _, dim = SIZES[device]
    q, k = (torch.zeros(1, h, 64, dim, dtype=torch.bfloat16, device=device) for h in (heads, groups))
    row = torch.arange(64)[None]
    masks = {"plain": None, "causal": Intervals.causal(64), "masked": Intervals(row - 8, row, 64)}
    kernel = choose_kernel("auto", q, k, masks[kind])[0]
    subject = f"bf16, head_dim {dim}, {kind}"
    if device == "cpu" or torch.cuda.get_device_capability() < (9, 0):
        return Row("auto kernel", subject, kernel.name)
    activated = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    newer = [name for name in IMPLEMENTATIONS.values() if is_installed(name)]
    found = f"{kernel.name}; activated in torch: {activated}; installed: {', '.join(newer) or 'neither 3 nor 4'}"
    version_2 = kernel.name in VERSION_2 and activated is None
    return Row("auto kernel", subject, found, "not FlashAttention 2", not (newer and version_2))


def why_not_run(name: str, device: str) -> str | None:
    """Return why a kernel of KERNELS cannot run here at all, such as a package that is not installed; or None.

    A shape that each kernel computes decides. A kernel that does not exist is left to its part, which fails.
    """
    name, _, implementation = name.partition("@")
    if implementation:
        package = IMPLEMENTATIONS[implementation]
        return None if is_installed(package) else f"{package} is not installed"
    if name not in kernel_names():
        return None
    probe = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return kernel_by_name(name).unsupported_reason(probe, probe)


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False


def synchronisations(run: Any, device: str, subject: str) -> Row:
    """Return the row of the host synchronisations of one call, after one call that is not counted."""
    if device != "cuda":
        return Row("host synchronisations", subject, "not measurable without CUDA")
    run()
    lines = host_synchronisations(run)
    found = f"{lines.total()} in a forward pass" + "".join(f"; {line} x {count}" for line, count in lines.items())
    return Row("host synchronisations", subject, found, str(SYNCHRONISATIONS), lines.total() <= SYNCHRONISATIONS)
