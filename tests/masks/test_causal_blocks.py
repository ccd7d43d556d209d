"""Layer: one process. The causal mask of dealt text, and the cutting of tiles by rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from masks.painting import assert_paints, paint
from mllm_seqpar.errors import MaskError
from mllm_seqpar.masks import CausalBlockMasks, Rectangle, clip_rows
from mllm_seqpar.sharding import LAYOUTS, sequence_positions


def restrictions(batch: int, total: int) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """(first, valid) of CausalBlockMasks by name."""
    position = torch.arange(total)
    begins = torch.tensor([0, 0, total // 3, total // 2])[
        torch.bucketize(position, torch.tensor([1, total // 3, total // 2]), right=True)
    ]
    lengths = torch.arange(batch)[:, None] * 5 + 2
    return {
        "plain": (None, None),
        "sliding window": ((position - 3).clamp(min=0)[None], None),
        "packed": (begins[None], None),
        "packed in a window": (torch.maximum(begins, position - 5)[None], None),
        "padded on the right": (None, position < lengths.clamp(max=total)),
        "padded on the left": (None, position >= total - lengths),
        "holes": (None, torch.rand(batch, total) < 0.7),
        "padding and window": ((position - 6).clamp(min=0).expand(batch, -1), position < total - lengths),
        "nothing valid": (None, torch.zeros(batch, total, dtype=torch.bool)),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(restrictions(1, 8)))
def test_every_block_shows_its_part_of_the_causal_mask(name: str, layout: str) -> None:
    for size, total, batch in ((1, 7, 1), (2, 12, 2), (3, 24, 2), (4, 24, 1)):
        first, valid = restrictions(batch, total)[name]
        position = torch.arange(total)
        dense = (position <= position[:, None]).expand(batch, -1, -1)
        if first is not None:
            dense = dense & (position >= first[..., None])
        if valid is not None:
            dense = dense & valid[:, None]
        blocks = CausalBlockMasks(batch, total, size, layout, first, valid)
        for row in range(size):
            for column in range(size):
                rows, keys = (sequence_positions(total, rank, size, layout) for rank in (row, column))
                expected = dense[:, rows][..., keys]
                assert_paints(blocks.tiles(row, column), expected)
                assert_paints(blocks.folded().tiles(row, column), expected.flatten(0, 1)[None])


def test_blocks_in_the_past_need_no_mask_and_those_in_the_future_no_work() -> None:
    blocks = CausalBlockMasks(2, 24, 3, "contiguous")
    assert blocks.tiles(0, 1) == () and blocks.tiles(1, 2) == ()
    assert blocks.tiles(2, 0) == (Rectangle((0, 2), (0, 8), (0, 8)),)
    assert blocks.tiles(1, 1) == (Rectangle((0, 2), (0, 8), (0, 8), "causal"),)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_padding_no_mask_is_ever_expanded(layout: str) -> None:
    blocks = CausalBlockMasks(1, 64, 4, layout)
    found = [tile for row in range(4) for column in range(4) for tile in blocks.tiles(row, column)]
    assert all(tile.kind != "masked" for tile in found)
    assert sum(tile.entries for tile in found) == 64 * 65 // 2


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_balanced_layouts_share_the_work_out_evenly(size: int, layout: str) -> None:
    total = 32 * size
    blocks = CausalBlockMasks(1, total, size, layout)
    work = [sum(t.entries for c in range(size) for t in blocks.tiles(rank, c)) for rank in range(size)]
    assert max(work) <= 1.06 * min(work)


@pytest.mark.parametrize("what", ["first", "valid"])
def test_a_mask_of_another_length_is_refused(what: str) -> None:
    with pytest.raises(MaskError, match=rf"{what} is \(1, 9\); expected \(2 or 1, 8\)"):
        CausalBlockMasks(
            2, 8, 2, "zigzag", **{what: torch.zeros(1, 9, dtype=torch.int64 if what == "first" else torch.bool)}
        )


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_clipping_cuts_a_tile_in_two_without_losing_or_repeating_an_entry(kind: str) -> None:
    rows, keys = (2, 9), (3, 10)
    visible = torch.rand(1, 12, 12) < 0.5

    class Rule:
        def expand(self, batch, rows, keys, device):
            return visible[slice(*batch), slice(*rows), slice(*keys)]

    tile = Rectangle((0, 1), rows, keys, kind, Rule() if kind == "masked" else None)
    whole, _ = paint([tile], 1, 12, 12)
    for cut in range(13):
        parts = [*clip_rows(tile, 0, cut), *clip_rows(tile, cut, 12)]
        found, computed = paint(parts, 1, 12, 12)
        assert torch.equal(found, whole) and int(computed.max()) == 1
        assert all(part.rows[1] <= cut or part.rows[0] >= cut for part in parts)
    middle, _ = paint(list(clip_rows(tile, 4, 7)), 1, 12, 12)
    assert torch.equal(middle[:, 4:7], whole[:, 4:7]) and int(middle.sum()) == int(whole[:, 4:7].sum())
