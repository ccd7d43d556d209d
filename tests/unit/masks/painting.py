"""Expands mask rectangles back into the table that they were cut from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mllm_seqpar.masks import Rectangle
from mllm_seqpar.masks import rectangles as module


def paint(rectangles: Sequence[Rectangle], batch: int, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return (visible, computed), (batch, rows, keys): how many rectangles show each entry, and how many contain it."""
    visible, computed = torch.zeros(2, batch, rows, keys, dtype=torch.int64)
    for rectangle in rectangles:
        index = torch.arange(keys)[rectangle.key_index(torch.device("cpu"))]
        where = (slice(*rectangle.batch), slice(*rectangle.rows), index)
        shape = tuple(stop - start for start, stop in (rectangle.batch, rectangle.rows, rectangle.keys))
        assert min(shape) > 0, rectangle
        assert 0 <= rectangle.rows[0] and rectangle.rows[1] <= rows and 0 <= rectangle.keys[0], rectangle
        assert index.numel() == shape[2] and bool((index.diff() > 0).all()), "each key once, in ascending order"
        mask = rectangle.mask(torch.device("cpu"))
        if rectangle.kind == "masked":
            assert mask is not None and mask.dtype is torch.bool and mask.shape == shape
            assert mask.numel() <= module.MAX_MASK, f"a mask of {mask.numel()} entries"
            shown = mask
        else:
            assert mask is None
            shown = torch.ones(shape[1:], dtype=torch.bool)
        if rectangle.kind == "causal":
            assert shape[1] == shape[2], "a causal rectangle is a square"
            shown = shown.tril()
        visible[where] += shown
        computed[where] += shown if rectangle.kind == "causal" else 1
    return visible, computed


def assert_paints(rectangles: Sequence[Rectangle], expected: Tensor, waste: float | None = None) -> None:
    """Assert that disjoint rectangles show `expected` (batch, rows, keys) and compute at most `waste` times as much."""
    visible, computed = paint(rectangles, *expected.shape)
    assert int(computed.max() if computed.numel() else 0) <= 1, "rectangles overlap"
    assert torch.equal(visible.bool(), expected)
    assert int(computed.sum()) == sum(rectangle.entries for rectangle in rectangles)
    if waste is not None:
        assert int(computed.sum()) <= waste * int(expected.sum())
