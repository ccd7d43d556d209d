"""Layer: one process. Merging partial results: any order, any grouping, nothing overflows, rows that see nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dense_attention import dense_attention
from mllm_seqpar.kernels.merge import merge
from tolerances import relative_error

NOTHING = float("-inf")


def parts(sizes: tuple[int, ...], offset: float = 0.0) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Partial results in float64 over pieces of the keys, and the whole."""
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, sum(sizes), 4)
    v = torch.randn(1, 2, sum(sizes), 4)
    pieces = [dense_attention(q, *kv, None, 1.0) for kv in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)]
    o, lse = dense_attention(q, k, v, None, 1.0)
    return [(o, lse + offset) for o, lse in pieces], o, lse + offset


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_every_order_and_grouping_gives_the_whole(offset: float) -> None:
    pieces, o, lse = parts((1, 3, 2), offset)
    for a, b, c in itertools.permutations(pieces):
        for found in (merge(merge(a, b), c), merge(a, merge(b, c))):
            assert relative_error(found[0], o) < 1e-10 and relative_error(found[1], lse) < 1e-12


def test_nothing_is_neutral_and_stays_nothing() -> None:
    (some,), o, lse = parts((3,))
    nothing = torch.zeros_like(o), torch.full_like(lse, NOTHING)
    for found in (merge(some, nothing), merge(nothing, some)):
        assert torch.equal(found[0], o) and torch.equal(found[1], lse)
    found = merge(nothing, nothing)
    assert not found[0].any() and bool((found[1] == NOTHING).all())


@pytest.mark.parametrize("gap", [200.0, 1e4, 3e38])
def test_what_is_far_smaller_vanishes_without_overflow(gap: float) -> None:
    small, large = ((torch.full((2, 4), value), torch.full((2,), value)) for value in (1.0, 2.0))
    small, large = (small[0], small[1] - gap), (large[0], large[1] + gap)
    for found in (merge(small, large), merge(large, small)):
        assert torch.equal(found[0], large[0]) and torch.equal(found[1], large[1])


def test_16_bit_partials_are_merged_in_float32() -> None:
    pieces, o, _ = parts((4, 4))
    rounded = [(o.bfloat16(), lse.float()) for o, lse in pieces]
    found = merge(*rounded)
    assert found[0].dtype is torch.bfloat16 and found[1].dtype is torch.float32
    wide = merge(*((o.float(), lse) for o, lse in rounded))
    assert torch.equal(found[0], wide[0].bfloat16()), "one rounding, at the end"
    assert merge(rounded[0], (rounded[1][0].float(), rounded[1][1]))[0].dtype is torch.float32
