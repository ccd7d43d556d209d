"""Layer: one process. The log-sum-exp merge of partial results: any order, no overflow, rows that see nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mllm_seqpar.kernels import kernel_by_name
from mllm_seqpar.kernels.merge import merge
from tolerances import relative_error

Partial = tuple[Tensor, Tensor]


def partials(sizes: tuple[int, ...], offset: float = 0.0) -> tuple[list[Partial], Partial]:
    """Return partial results in float64 over parts of the keys, and the result over all keys."""
    q, k, v = (torch.randn(1, 2, rows, 4, dtype=torch.float64) for rows in (5, sum(sizes), sum(sizes)))
    forward = kernel_by_name("reference").forward
    parts = [forward(q, *kv, scale=1.0) for kv in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)]
    o, lse = forward(q, k, v, scale=1.0)
    return [(o, lse + offset) for o, lse in parts], (o, lse + offset)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_merge_is_associative_and_commutative(offset: float) -> None:
    parts, (o, lse) = partials((1, 3, 2), offset)
    for a, b, c in itertools.permutations(parts):
        for found in (merge(merge(a, b), c), merge(a, merge(b, c))):
            assert relative_error(found[0], o) < 1e-10 and relative_error(found[1], lse) < 1e-12


def test_rows_that_see_nothing_are_neutral() -> None:
    (some,), (o, lse) = partials((3,))
    nothing = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    for found in (merge(some, nothing), merge(nothing, some)):
        assert torch.equal(found[0], o) and torch.equal(found[1], lse)
    found = merge(nothing, nothing)
    assert not found[0].any() and bool((found[1] == -torch.inf).all())


@pytest.mark.parametrize("gap", [200.0, 1e4, 3e38])
def test_much_smaller_partial_vanishes_without_overflow(gap: float) -> None:
    small, large = ((torch.full((2, 4), value), torch.full((2,), value)) for value in (1.0, 2.0))
    small, large = (small[0], small[1] - gap), (large[0], large[1] + gap)
    for found in (merge(small, large), merge(large, small)):
        assert torch.equal(found[0], large[0]) and torch.equal(found[1], large[1])


def test_16_bit_partials_are_merged_in_float32() -> None:
    parts, _ = partials((4, 4))
    rounded = [(o.bfloat16(), lse.float()) for o, lse in parts]
    found = merge(*rounded)
    assert found[0].dtype is torch.bfloat16 and found[1].dtype is torch.float32
    wide = merge(*((o.float(), lse) for o, lse in rounded))
    assert torch.equal(found[0], wide[0].bfloat16()), "one rounding, at the end"
    assert merge(rounded[0], (rounded[1][0].float(), rounded[1][1]))[0].dtype is torch.float32
