"""Expands intervals, and rectangles that were cut from them, back into tables."""

from __future__ import annotations

import torch
from torch import Tensor

from mllm_seqpar.kernels.rectangles import rectangles_of
from mllm_seqpar.masks import BlockMask, Intervals

CPU, ALL = torch.device("cpu"), slice(None)


def table_of(intervals: Intervals, batch: int) -> Tensor:
    """Return (batch, rows, keys) bool."""
    return intervals.expand(CPU, ALL, ALL, slice(0, intervals.keys)).expand(batch, -1, -1)


def assert_shows(mask: BlockMask, expected: Tensor) -> None:
    """Assert that disjoint layers show `expected` (batch, rows, keys), none of them empty or needless."""
    if mask is None:
        assert expected.numel() and bool(expected.all())
        return
    assert not bool(expected.all()) or not expected.numel(), "a block of which everything is visible has no intervals"
    shown = torch.zeros(expected.shape, dtype=torch.int64)
    for layer in mask:
        assert layer.low.dtype is layer.high.dtype is torch.int32
        assert layer.low.is_contiguous() and layer.high.is_contiguous()
        assert bool((layer.low >= 0).all()) and bool((layer.high <= expected.shape[2]).all())
        empty = layer.high <= layer.low
        assert not layer.high[empty].any() and not layer.low[empty].any()
        found = table_of(layer, expected.shape[0])
        assert layer.visible == int(found[: layer.low.shape[0]].sum()) > 0
        assert_cuts(layer, found)
        shown += found
    assert torch.equal(shown, expected.long()), "layers are disjoint and show the table"


def assert_cuts(layer: Intervals, expected: Tensor, waste: float | None = None) -> None:
    """Assert that disjoint rectangles show `expected` (batch, rows, keys) and compute at most `waste` times as much."""
    visible, computed = torch.zeros(2, *expected.shape, dtype=torch.int64)
    for rectangle in rectangles_of(layer):
        where = rectangle.batch, rectangle.rows, rectangle.keys
        assert expected[where].numel(), rectangle
        shown = torch.ones(expected[where].shape[1:], dtype=torch.int64)
        if rectangle.kind == "masked":
            shown = layer.expand(CPU, *where).long()
        if rectangle.kind == "causal":
            assert shown.shape[0] == shown.shape[1], "a causal rectangle is a square"
            shown = shown.tril()
        visible[where] += shown
        computed[where] += shown if rectangle.kind == "causal" else 1
    assert int(computed.max() if computed.numel() else 0) <= 1, "rectangles overlap"
    assert torch.equal(visible.bool(), expected)
    if waste is not None:
        assert int(computed.sum()) <= waste * int(expected.sum())
