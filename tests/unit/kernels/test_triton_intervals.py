"""Layer: one process, no GPU. The Triton programs for intervals against float64, in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import interpreted_triton
import pytest
import torch
from torch import Tensor

from dense_attention import dense_attention, squared_terms
from mllm_seqpar.kernels import triton_intervals
from mllm_seqpar.kernels.base import merge_
from mllm_seqpar.kernels.triton_intervals import ROWS_AT_ONCE, TritonKernel, launch_of
from tolerances import EXACT, relative_error

pytestmark = [pytest.mark.rounding, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

NAMES = ("o", "lse", "dq", "dk", "dv")
FAMILIES = ("random", "stairs", "window", "packed", "holes", "few")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    interpreted_triton.with_bfloat16(monkeypatch)


def intervals(family: str, batch: int, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return low and high (batch, rows) of one family of masks; some rows see nothing."""
    a, b = torch.randint(0, keys + 1, (2, batch, rows))
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    at = torch.arange(rows) * keys // max(rows, 1)
    if family == "stairs":
        low, high = torch.zeros_like(low), high.sort(dim=1).values
    elif family == "window":
        low, high = (at - keys // 5).clamp_min(0).expand_as(low), (at + 1).expand_as(high)
    elif family == "packed":  # three sequences, each in the order of the keys, with rows of padding at the end
        piece = (torch.arange(rows) * 3 // max(rows, 1)).expand_as(low)
        low, high = piece * keys // 3, torch.minimum((piece + 1) * keys // 3, (at + 1).expand_as(low))
        high = torch.where(torch.arange(rows) < rows - rows // 8, high, low)
    elif family == "holes":
        high = torch.where(torch.rand(batch, rows) < 0.5, low, high)
    elif family == "few":
        high = torch.where(torch.arange(rows) == rows // 2, high, low)
    hidden = low >= high
    return tuple(x.masked_fill(hidden, 0).to(torch.int32).contiguous() for x in (low, high))


def visible(low: Tensor, high: Tensor, keys: int) -> Tensor:
    index = torch.arange(keys)
    return (index >= low.unsqueeze(-1)) & (index < high.unsqueeze(-1))


def attention(inputs: list[Tensor], low: Tensor | None, high: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """Return o, lse, dq, dk, dv of the kernel for inputs q, k, v, do."""
    q, k, v, do = inputs
    operators = torch.ops.mllm_seqpar
    o, lse = operators.interval_attention(q, k, v, low, high, scale)
    delta = (do.float() * o).sum(-1)
    return o, lse, *operators.interval_attention_backward(do, q, k, v, low, high, lse, delta, scale)


def check(
    *, family: str | None, batch=1, heads=2, groups=1, rows=40, keys=90, dim=16, dtype=torch.float32, scale=None, **_: Any
) -> None:
    """Compare one random block with float64."""
    q, do = torch.randn(2, batch, heads, rows, dim).to(dtype)
    k, v = torch.randn(2, batch, groups, keys, dim).to(dtype)
    low, high = (None, None) if family is None else intervals(family, batch, rows, keys)
    mask = None if low is None else visible(low, high, keys)
    scale = dim**-0.5 if scale is None else scale
    found = attention([q, k, v, do], low, high, scale)
    compare(found, (q, k, v, do), mask, scale)


def compare(found: tuple[Tensor, ...], inputs: tuple[Tensor, ...], mask: Tensor | None, scale: float) -> None:
    *leaves, do = (x.detach().double().requires_grad_() for x in inputs)
    o, lse = dense_attention(*leaves, mask, scale)
    exact = o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do.detach())
    terms = squared_terms(*inputs, mask, scale)
    hidden = exact[1] == -torch.inf
    assert torch.equal(found[1] == -torch.inf, hidden)
    assert not found[0][hidden].any() and not found[2][hidden].any()
    for name, value, right in zip(NAMES, found, exact, strict=True):
        assert value.dtype == torch.float32 and value.is_contiguous() and value.shape == right.shape
        size = terms[name].masked_fill(~terms[name].isfinite(), 0.0).sum().sqrt()
        value, right = (x.masked_fill(x == -torch.inf, 0.0) for x in (value, right))
        bound = min(EXACT[inputs[0].dtype], 1e-3) if name == "lse" else EXACT[inputs[0].dtype]
        assert relative_error(value, right, size) <= bound, name


@pytest.mark.parametrize("family", [*FAMILIES, None])
def test_masks_equal_dense_attention(family):
    torch.manual_seed(0)
    for sizes in ({"heads": 6, "groups": 2, "batch": 2}, {"rows": 1, "heads": 7}, {"rows": 33, "keys": 17}, {"keys": 1}):
        check(family=family, **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_head_dims_and_dtypes(dtype):
    torch.manual_seed(0)
    for dim in (64, 72, 80, 96, 128, 256):
        check(family="stairs", dim=dim, dtype=dtype)


@pytest.mark.slow
def test_random_masks_of_random_sizes():
    for seed in range(60):
        torch.manual_seed(seed)
        batch, groups, repeat = (int(x) for x in torch.randint(1, 4, (3,)))
        rows, keys = (int(x) for x in torch.randint(1, 200, (2,)))
        family = FAMILIES[seed % len(FAMILIES)]
        check(family=family, batch=batch, heads=groups * repeat, groups=groups, rows=rows, keys=keys, dim=8)


def test_rows_are_looked_at_in_several_chunks():
    torch.manual_seed(0)
    for family in ("stairs", "packed"):
        check(family=family, heads=1, rows=2 * ROWS_AT_ONCE + 3, keys=70)


@pytest.mark.parametrize("family", ["stairs", "holes", None])
def test_keys_are_split_for_few_rows(family, monkeypatch):
    """Empty parts, parts that a row does not see, and a last part that is shorter."""
    monkeypatch.setattr(triton_intervals, "_parts", lambda programs, keys, q: 5)
    torch.manual_seed(0)
    for rows, keys in ((3, 330), (20, 100)):
        check(family=family, heads=4, groups=2, rows=rows, keys=keys)


def test_intervals_are_shared_by_the_batch():
    torch.manual_seed(0)
    q, do = torch.randn(2, 3, 2, 20, 16)
    k, v = torch.randn(2, 3, 1, 50, 16)
    low, high = intervals("random", 1, 20, 50)
    compare(attention([q, k, v, do], low, high, 0.3), (q, k, v, do), visible(low, high, 50), 0.3)


def test_negative_scale():
    torch.manual_seed(0)
    check(family="stairs", scale=-0.4)


def test_logits_of_ten_thousand_do_not_overflow():
    torch.manual_seed(0)
    q, do = torch.randn(2, 1, 2, 30, 16)
    k, v = torch.randn(2, 1, 1, 60, 16)
    low, high = intervals("random", 1, 30, 60)
    found = attention([4e3 * q, k, v, do], low, high, 1.0)
    exact = dense_attention(4e3 * q, k, v, visible(low, high, 60), 1.0)
    assert found[1].abs()[found[1] > -torch.inf].max() > 1e4 and all(x.isfinite().all() for x in found[2:])
    assert relative_error(found[0], exact[0]) <= 1e-2


def test_inputs_may_be_views_and_do_float32():
    torch.manual_seed(0)
    q, do = torch.randn(2, 2, 4, 20, 16).bfloat16()
    k, v = torch.randn(2, 2, 2, 50, 16).bfloat16()
    bounds = intervals("random", 2, 20, 50)
    expected = attention([q, k, v, do], *bounds, 0.25)
    for view in (
        lambda x: torch.nn.functional.pad(x, (0, 0, 3, 2))[:, :, 3:-2],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
    ):
        views = [view(x) for x in (q, k, v, do)]
        assert not any(x.is_contiguous() for x in views)
        views[3] = views[3].float()
        assert all(torch.equal(a, b) for a, b in zip(attention(views, *bounds, 0.25), expected, strict=True))


def test_backward_takes_the_merged_output():
    """Rows that see nothing of one of two blocks have the log-sum-exp of the other."""
    torch.manual_seed(0)
    inputs = q, k, v, do = *torch.randn(1, 1, 4, 30, 16), *torch.randn(2, 1, 2, 80, 16), *torch.randn(1, 1, 4, 30, 16)
    low, high = intervals("random", 1, 30, 80)
    mask, operators = visible(low, high, 80), torch.ops.mllm_seqpar
    o, lse, parts = torch.zeros(1, 4, 30, 16), torch.full((1, 4, 30), -torch.inf), []
    for cut in (slice(0, 35), slice(35, 80)):
        bounds = [(x - cut.start).clamp(0, cut.stop - cut.start) for x in (low, high)]
        parts.append((k[:, :, cut], v[:, :, cut], *bounds))
        merge_(o, lse, *operators.interval_attention(q, *parts[-1], 0.25))
    delta = (do * o).sum(-1)
    grads = [operators.interval_attention_backward(do, q, *part, lse, delta, 0.25) for part in parts]
    found = o, lse, grads[0][0] + grads[1][0], *(torch.cat([grad[i] for grad in grads], 2) for i in (1, 2))
    compare(found, inputs, mask, 0.25)


def test_keys_that_no_row_sees_are_not_read():
    torch.manual_seed(0)
    q, do = torch.randn(2, 1, 2, 20, 16)
    k, v = torch.randn(2, 1, 1, 300, 16)
    low, high = (x.clamp(0, 60) + 150 * (x > 0) for x in intervals("random", 1, 20, 60))
    low = torch.where(high > 0, low.clamp_min(150), low)
    mask = visible(low, high, 300)
    unseen = ~mask.any(1)[0]
    first, last = int(low[high > 0].min()), int(high.max())
    unseen[first:last] = False  # keys between seen ones may be read
    expected = attention([q, k, v, do], low, high, 0.25)
    k[:, :, unseen], v[:, :, unseen] = torch.nan, torch.nan
    found = attention([q, k, v, do], low, high, 0.25)
    assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))
    assert all(torch.equal(a[:, :, first:last], b[:, :, first:last]) for a, b in zip(found[3:], expected[3:], strict=True))
    assert not any(x[:, :, unseen].any() for x in expected[3:])
