"""Painting tiles back into the table that they were cut from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mllm_seqpar.masks import Rectangle
from mllm_seqpar.masks.rectangles import MAX_MASK


def paint(tiles: Sequence[Rectangle], batch: int, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """(visible, computed), both (batch, rows, keys): how often each entry is visible in a tile, and lies in one."""
    visible, computed = torch.zeros(2, batch, rows, keys, dtype=torch.int64)
    for tile in tiles:
        places = torch.arange(keys)[tile.places(torch.device("cpu"))]
        where = (slice(*tile.batch), slice(*tile.rows), places)
        shape = tuple(stop - start for start, stop in (tile.batch, tile.rows, tile.keys))
        assert min(shape) > 0, tile
        assert 0 <= tile.rows[0] and tile.rows[1] <= rows and 0 <= tile.keys[0], tile
        assert places.numel() == shape[2] and bool((places.diff() > 0).all()), "a span, or each key once, ascending"
        mask = tile.mask(torch.device("cpu"))
        if tile.kind == "full":
            assert mask is None
            visible[where] += 1
            computed[where] += 1
        elif tile.kind == "causal":
            assert mask is None and shape[1] == shape[2], "a causal tile is a square"
            lower = torch.ones(shape[1:], dtype=torch.int64).tril()
            visible[where] += lower
            computed[where] += lower
        else:
            assert mask is not None and mask.dtype is torch.bool and mask.shape == shape
            assert mask.numel() <= MAX_MASK, f"a mask of {mask.numel()} entries"
            visible[where] += mask
            computed[where] += 1
    return visible, computed


def assert_paints(tiles: Sequence[Rectangle], expected: Tensor, waste: float | None = None) -> None:
    """Tiles are disjoint and show exactly `expected` (batch, rows, keys); at most `waste` times that is computed."""
    visible, computed = paint(tiles, *expected.shape)
    assert int(computed.max() if computed.numel() else 0) <= 1, "tiles overlap"
    assert torch.equal(visible.bool(), expected)
    assert int(computed.sum()) == sum(tile.entries for tile in tiles)
    if waste is not None:
        assert int(computed.sum()) <= waste * int(expected.sum())
