"""Layer: one process. The causal mask of sharded text as intervals, in every layout."""

from __future__ import annotations

import itertools

import pytest
import torch
from painting import assert_shows, table_of
from torch import Tensor

from attention_cases import computed_entries, visible_text
from mllm_seqpar.errors import MaskError
from mllm_seqpar.masks import BlockMasks
from mllm_seqpar.masks.block_masks import decoder_mask, text_mask, text_masks
from mllm_seqpar.masks.intervals import part_of_mask
from mllm_seqpar.sharding import LAYOUTS, sequence_positions


def restrictions(batch: int, total: int) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """(first, valid) of text by name."""
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


def masks_of(total: int, size: int, layout: str, *restriction: Tensor | None) -> BlockMasks:
    return text_masks([sequence_positions(total, rank, size, layout) for rank in range(size)], *restriction)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(restrictions(1, 8)))
def test_every_block_shows_its_part_of_the_causal_mask(name: str, layout: str) -> None:
    for size, total, batch in ((1, 7, 1), (2, 12, 2), (3, 24, 2)):
        first, valid = restrictions(batch, total)[name]
        dense = visible_text(batch, total, first, valid)
        blocks = masks_of(total, size, layout, first, valid)
        for i, j in itertools.product(range(size), repeat=2):
            rows, keys = (sequence_positions(total, rank, size, layout) for rank in (i, j))
            assert_shows(blocks.block(i, j), dense[:, rows][..., keys])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(restrictions(1, 8)))
def test_merged_ranks_have_their_tokens_in_the_order_of_the_text(name: str, layout: str) -> None:
    first, valid = restrictions(2, 24)[name]
    dense, blocks, groups = visible_text(2, 24, first, valid), masks_of(24, 4, layout, first, valid), ((0, 1), (2, 3))
    orders = blocks.orders(groups, torch.device("cpu"))
    merged = blocks.merged(groups, orders)
    tokens = [torch.cat([sequence_positions(24, rank, 4, layout) for rank in group]).sort().values for group in groups]
    for i, j in itertools.product(range(2), repeat=2):
        assert_shows(merged.block(i, j), dense[:, tokens[i]][..., tokens[j]])


def test_past_blocks_are_full_and_future_blocks_are_empty() -> None:
    blocks = masks_of(24, 3, "contiguous")
    assert blocks.block(0, 1) == () and blocks.block(1, 2) == () and blocks.block(2, 0) is None
    (square,) = blocks.block(1, 1) or ()
    assert square.is_causal and square.visible == 8 * 9 // 2 and square.low.shape == (1, 8)
    assert blocks.keys_are_rows and not blocks.prunes and blocks.visible_rows(0, 1) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_without_padding_is_one_layer_and_its_work_is_balanced(layout: str) -> None:
    blocks, x = masks_of(64, 4, layout), torch.zeros(1, 1, 16, 1)
    work = []
    for i in range(4):
        masks = [blocks.block(i, j) for j in range(4)]
        assert all(mask is None or len(mask) <= 1 for mask in masks)
        work.append(sum(computed_entries(x, x, None if m is None else m[0]) for m in masks if m != ()))
    assert sum(work) == 64 * 65 // 2
    if layout != "contiguous":
        assert max(work) <= 1.12 * min(work), "zigzag and striped balance the work"


def test_part_of_a_mask_neither_loses_nor_repeats_an_entry() -> None:
    first, valid = restrictions(2, 12)["holes"]
    mask, dense = masks_of(12, 1, "contiguous", first, valid).block(0, 0), visible_text(2, 12, first, valid)
    for cut in range(13):
        for rows in (slice(0, cut), slice(cut, 12)):
            assert_shows(part_of_mask(mask, rows), dense[:, rows])
        for keys in ((0, cut), (cut, 12)):
            assert_shows(part_of_mask(mask, keys=keys), dense[..., slice(*keys)])
    assert part_of_mask(None, slice(2, 5)) is None


def test_rows_against_the_keys_of_a_cache() -> None:
    held, valid = torch.tensor([0, 3, 4, 7]), torch.rand(2, 9) < 0.7
    rows = torch.arange(6, 9)
    mask = text_mask(rows, held, (rows - 4)[None], valid)
    expected = (held <= rows[:, None]) & (held >= rows[:, None] - 4) & valid[:, None, held]
    assert_shows(mask, expected)


def test_mask_of_a_decoder() -> None:
    assert decoder_mask(None, 1, 7) is None
    (layer,) = decoder_mask(None, 3, 7) or ()
    assert torch.equal(table_of(layer, 1)[0], torch.ones(3, 7).tril(4).bool())
    visible = torch.rand(2, 1, 3, 9) < 0.5
    for mask in (visible, torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)):
        assert_shows(decoder_mask(mask, 3, 7), visible[:, 0, :, :7])
    with pytest.raises(MaskError, match=r"expected \(B, 1, rows, keys\) as transformers prepares it, got \(2, 3, 9\)"):
        decoder_mask(visible[:, 0], 3, 7)
