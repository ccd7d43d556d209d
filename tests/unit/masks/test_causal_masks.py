"""Layer: one process. The causal mask of sharded text, and rectangles clipped to a range of rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from painting import assert_paints, paint
from torch import Tensor

from attention_cases import visible_text
from mllm_seqpar.errors import MaskError
from mllm_seqpar.masks import CausalBlockMasks, Rectangle, clip_rows
from mllm_seqpar.sharding import LAYOUTS, sequence_positions


def restrictions(batch: int, total: int) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """(first, valid) of CausalBlockMasks by name."""
    position = torch.arange(total)
    sequence = torch.bucketize(position, torch.tensor([1, total // 3, total // 2]), right=True)
    starts = torch.tensor([0, 0, total // 3, total // 2])[sequence]
    lengths = torch.arange(batch)[:, None] * 5 + 2
    return {
        "plain": (None, None),
        "sliding window": ((position - 3).clamp(min=0)[None], None),
        "packed": (starts[None], None),
        "packed in a window": (torch.maximum(starts, position - 5)[None], None),
        "padded on the right": (None, position < lengths.clamp(max=total)),
        "padded on the left": (None, position >= total - lengths),
        "holes": (None, torch.rand(batch, total) < 0.7),
        "padding and window": ((position - 6).clamp(min=0).expand(batch, -1), position < total - lengths),
        "nothing valid": (None, torch.zeros(batch, total, dtype=torch.bool)),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(restrictions(1, 8)))
def test_every_block_shows_its_part_of_the_causal_mask(name: str, layout: str) -> None:
    for size, total, batch in ((1, 7, 1), (2, 12, 2), (3, 24, 2)):
        first, valid = restrictions(batch, total)[name]
        dense = visible_text(batch, total, first, valid)
        blocks = CausalBlockMasks(batch, total, size, layout, first, valid)
        for i, j in itertools.product(range(size), repeat=2):
            rows, keys = (sequence_positions(total, rank, size, layout) for rank in (i, j))
            expected = dense[:, rows][..., keys]
            assert_paints(blocks.rectangles(i, j), expected)


def test_past_blocks_are_full_and_future_blocks_are_empty() -> None:
    blocks = CausalBlockMasks(2, 24, 3, "contiguous")
    assert blocks.rectangles(0, 1) == () and blocks.rectangles(1, 2) == ()
    assert blocks.rectangles(2, 0) == (Rectangle((0, 2), (0, 8), (0, 8)),)
    assert blocks.rectangles(1, 1) == (Rectangle((0, 2), (0, 8), (0, 8), "causal"),)
    assert blocks.keys_are_rows and not blocks.prunes and blocks.visible_rows(0, 1) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_without_padding_needs_no_expanded_mask(layout: str) -> None:
    blocks = CausalBlockMasks(1, 64, 4, layout)
    by_rank = [[r for j in range(4) for r in blocks.rectangles(i, j)] for i in range(4)]
    assert all(rectangle.kind != "masked" for rectangles in by_rank for rectangle in rectangles)
    work = [sum(rectangle.entries for rectangle in rectangles) for rectangles in by_rank]
    assert sum(work) == 64 * 65 // 2
    if layout != "contiguous":
        assert max(work) <= 1.12 * min(work), "zigzag and striped balance the work"


def test_restriction_of_another_shape_is_rejected() -> None:
    for name, shape in itertools.product(("first", "valid"), ((1, 9), (3, 8))):
        with pytest.raises(MaskError, match=rf"{name} is \({shape[0]}, {shape[1]}\); expected \(2 or 1, 8\)"):
            CausalBlockMasks(2, 8, 2, "zigzag", **{name: torch.zeros(shape, dtype=torch.int64)})


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_clipping_at_a_row_neither_loses_nor_repeats_an_entry(kind: str) -> None:
    visible = torch.rand(1, 12, 12) < 0.5

    class TableRule:
        def expand(self, batch, rows, keys, device):
            return visible[slice(*batch), slice(*rows), slice(*keys)]

    rectangle = Rectangle((0, 1), (2, 9), (3, 10), kind, TableRule() if kind == "masked" else None)
    whole, _ = paint([rectangle], 1, 12, 12)
    for cut in range(13):
        parts = [*clip_rows(rectangle, 0, cut), *clip_rows(rectangle, cut, 12)]
        found, computed = paint(parts, 1, 12, 12)
        assert torch.equal(found, whole) and int(computed.max()) == 1
        assert all(part.rows[1] <= cut or part.rows[0] >= cut for part in parts)
    middle, _ = paint(list(clip_rows(rectangle, 4, 7)), 1, 12, 12)
    assert torch.equal(middle[:, 4:7], whole[:, 4:7]) and int(middle.sum()) == int(whole[:, 4:7].sum())
