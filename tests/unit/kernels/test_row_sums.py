"""Layer: one process. delta = rowsum(do * o), which backward needs of o, and the o that stands for it in operators."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CPU_KERNELS, KINDS, block, kernel_for, run
from torch import Tensor

from mllm_seqpar.kernels.base import output_with_row_sums, row_sums

pytestmark = pytest.mark.rounding

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rows(kind: str, dtype: torch.dtype, dim: int = 64) -> tuple[Tensor, Tensor]:
    """(do, o) of 256 rows; a do that is constant or has outliers is where do * delta / |do|^2 rounds badly."""
    generator = torch.Generator().manual_seed(0)
    do, o = torch.randn(2, 1, 2, 128, dim, generator=generator)
    if kind == "constant":
        do = do.sign()
    if kind == "outlier":
        do[..., 1] *= 300.0
    if kind == "one element":
        do[..., torch.arange(dim) != 5] = 0.0
    return do.to(dtype), o.to(dtype)


def row_errors(do: Tensor, o: Tensor, delta: Tensor) -> Tensor:
    """The relative error of each row sum; a sum near 0 is compared with a hundredth of the largest one."""
    size, sums = delta.double().abs(), (do.double() * o.double()).sum(-1)
    return (sums - delta.double()).abs() / size.clamp_min(0.01 * float(size.max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "constant", "outlier"])
def test_row_sums_survive_the_rounding_to_16_bits(kind: str, dtype: torch.dtype) -> None:
    for dim in (64, 7):
        do, o = rows(kind, dtype, dim)
        delta = row_sums(do, o)
        assert delta.dtype == torch.promote_types(dtype, torch.float32) and delta.is_contiguous()
        found = output_with_row_sums(do, delta, dtype)
        assert found.dtype == dtype and found.shape == do.shape
        assert row_errors(do, found, delta).max() <= max(torch.finfo(dtype).eps ** 2, 8 * torch.finfo(delta.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_with_one_element_has_the_rounding_of_one_number(dtype: torch.dtype) -> None:
    do, o = rows("one element", dtype)
    delta = row_sums(do, o)
    assert row_errors(do, output_with_row_sums(do, delta, dtype), delta).max() <= 2 * torch.finfo(delta.dtype).eps
    do, delta = do[..., 5:6], delta + 1.0  # a head dim of 1, and a delta that is no product of two numbers
    assert row_errors(do, output_with_row_sums(do, delta, dtype), delta).max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_sums_of_tiny_and_huge_gradients(dtype: torch.dtype, size: float) -> None:
    """|do|^2 is no float32 for any of these."""
    do, o = rows("normal", torch.float32)
    do = (do * size).to(dtype)
    delta = row_sums(do, o)
    found = output_with_row_sums(do, delta, dtype)
    assert found.isfinite().all() and (delta != 0).all()
    assert row_errors(do, found, delta).max() <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_of_zeros_gives_exact_zeros_and_nan_stays(dtype: torch.dtype) -> None:
    do, o = rows("normal", dtype)
    do[:, :, 3] = 0.0
    o[:, :, 4] = torch.nan
    found = output_with_row_sums(do, row_sums(do, o), dtype)
    assert torch.equal(found[:, :, 3], torch.zeros_like(found[:, :, 3]))
    assert found[:, :, 4].isnan().any(dim=-1).all() and not found[:, :, 5:].isnan().any()


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e30])
def test_gradients_from_delta_equal_those_from_o(name: str, kind: str, size: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        b = block(dtype=dtype, **KINDS[kind])
        b.do[:, :, 7] = 0.0
        b.do *= size
        found, expected = (run(kernel_for(name, b), b, of_delta=x)[2:] for x in (True, False))
        assert not found[0][:, :, 7].any()
        for ours, with_o in zip(found, expected, strict=True):
            torch.testing.assert_close(ours / size, with_o / size, rtol=1e-4, atol=1e-4)
