"""Layer: one process. Frame masks as rectangles: disjoint, complete, bounded, with few entries computed in vain."""

from __future__ import annotations

import random

import pytest
import torch
from painting import assert_paints, paint
from torch import Tensor

from mllm_seqpar.errors import MaskError
from mllm_seqpar.masks import FrameBlockMasks, FrameMask, rectangles
from mllm_seqpar.masks.rectangles import dense_rectangles, interval_rectangles

WASTE = 1.3
"""Entries computed per visible entry, for masks whose visible entries are whole frames."""

ROWS = torch.zeros(1, 4, dtype=torch.int64)


def table_of(low: Tensor, high: Tensor, units: int, tokens: int) -> Tensor:
    unit = torch.arange(units)
    return ((unit >= low[..., None]) & (unit < high[..., None])).repeat_interleave(tokens, -1)


def patterns(rows: int, units: int) -> dict[str, tuple[Tensor, Tensor]]:
    """First and last-plus-one unit of each row, by name; some exceed the block."""
    row = torch.arange(rows)
    zero, last = torch.zeros_like(row), torch.full_like(row, units)
    return {
        "everything": (zero, last),
        "nothing": (last, zero),
        "one per row": (row, row + 1),
        "two rows each": (row // 2, row // 2 + 1),
        "staircase": (zero, row + 1),
        "slow staircase": (zero, row // 3 + 1),
        "late staircase": (zero, row - rows // 2),
        "staircase down": (row, last),
        "window": (row - 2, row + 1),
        "every other row": (zero, torch.where(row % 2 == 0, units, 0)),
        "beyond the block": (row - units, row + units),
        "long gap": (zero, torch.where((row < 2) | (row > rows - 3), units, 0)),
        "random": (torch.randint(-2, units + 1, (rows,)), torch.randint(0, units + 3, (rows,))),
    }


NAMES = list(patterns(4, 4))


@pytest.mark.parametrize("name", NAMES)
def test_interval_and_dense_rectangles_show_the_same_table(name: str) -> None:
    for rows, units, tokens in ((1, 1, 1), (2, 7, 3), (9, 4, 3), (24, 24, 1), (24, 24, 3), (40, 13, 1)):
        low, high = (x[None] for x in patterns(rows, units)[name])
        expected = table_of(low, high, units, tokens)
        assert_paints(interval_rectangles(low, high, units, tokens), expected, WASTE)
        assert_paints(dense_rectangles(table_of(low, high, units, 1), tokens), expected, WASTE)


@pytest.mark.parametrize("tokens", [1, 3])
def test_batch_items_may_differ_and_equal_ones_share_rectangles(tokens: int) -> None:
    table = patterns(12, 9)
    low, high = (torch.stack([table[name][i] for name in NAMES]) for i in (0, 1))
    assert_paints(interval_rectangles(low, high, 9, tokens), table_of(low, high, 9, tokens), WASTE)
    low, high = (x.expand(3, -1) for x in table["slow staircase"])
    for found in (
        interval_rectangles(low, high, 9, tokens),
        dense_rectangles(table_of(low, high, 9, 1), tokens),
    ):
        assert {rectangle.batch for rectangle in found} == {(0, 3)}
        assert_paints(found, table_of(low, high, 9, tokens), WASTE)


@pytest.mark.parametrize(
    "first,items,rows,expected",
    [
        (0, 1, 4, [(0, 1, 0, 4)]),
        (0, 4, 9, [(0, 4, 0, 2), (0, 4, 2, 4), (0, 4, 4, 6), (0, 4, 6, 8), (0, 4, 8, 9)]),
        (2, 8, 2, [(2, 10, 0, 1), (2, 10, 1, 2)]),
        (2, 9, 1, [(2, 10, 0, 1), (10, 11, 0, 1)]),  # more batch items than masks of one row of 256 keys
    ],
)
def test_large_masks_are_cut_by_batch_items_then_rows(
    first: int, items: int, rows: int, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rectangles, "MAX_MASK", 8 * 256)
    found = list(rectangles.masked_rectangles((first, first + items), (0, rows), (3, 5), 100, None))
    assert [(*r.batch, *r.rows) for r in found] == expected
    assert {r.keys for r in found} == {(300, 500)}
    found = list(rectangles.masked_rectangles((0, 8), (5, 6), (0, 3), 100, None))
    assert [(r.rows, r.keys) for r in found] == [((5, 6), (0, 256)), ((5, 6), (256, 300))]


def test_rows_are_merged_while_a_quarter_more_is_computed_than_is_visible() -> None:
    for low, high, expected in [
        ([0, 0], [6, 9], [(0, 1, 0, 12, "full"), (1, 2, 0, 18, "full")]),  # two runs need no mask
        ([0, 0, 0], [6, 8, 9], [(0, 3, 0, 12, "full"), (0, 3, 12, 18, "masked")]),  # 27 <= 1.25 * 23
        ([0, 0, 0], [5, 5, 9], [(0, 2, 0, 10, "full"), (2, 3, 0, 18, "full")]),  # 27 > 1.25 * 19
        ([3, 1, 0], [9, 9, 9], [(0, 3, 6, 18, "full"), (0, 3, 0, 6, "masked")]),
        ([5, 5, 0], [9, 9, 9], [(0, 2, 10, 18, "full"), (2, 3, 0, 18, "full")]),
        (
            [0, 0, 1, 1, 1],
            [5, 5, 6, 6, 5],
            [(0, 5, 2, 10, "full"), (0, 5, 0, 2, "masked"), (0, 5, 10, 12, "masked")],
        ),
        ([0, 0, 2, 2], [5, 5, 7, 7], [(0, 2, 0, 10, "full"), (2, 4, 4, 14, "full")]),
        ([1, 9, 1, 1, 1, 2], [9] * 6, [(0, 6, 2, 18, "masked")]),  # a row between that attends to nothing
    ]:
        bounds = torch.tensor([low]), torch.tensor([high])
        found = interval_rectangles(*bounds, 9, 2)
        assert [(*r.rows, *r.keys, r.kind) for r in found] == expected
        if 9 not in low and len(low) > 2:
            by_table = dense_rectangles(table_of(*bounds, 9, 1), 2)
            assert sum(r.entries for r in by_table) == sum(r.entries for r in found)


def test_random_runs_of_equal_climbing_and_unrelated_rows() -> None:
    for seed in range(30):
        number = random.Random(seed).randrange
        rows, units, tokens = number(1, 60), number(1, 20), number(1, 4)
        low, high = [], []
        while len(low) < rows:
            first, last, slope_low, slope_high = number(-1, units), number(-1, units + 2), number(2), number(2)
            length = number(1, 9)
            low += [first + slope_low * i for i in range(length)]
            high += [last + slope_high * i for i in range(length)]
        bounds = torch.tensor(low[:rows])[None], torch.tensor(high[:rows])[None]
        assert_paints(interval_rectangles(*bounds, units, tokens), table_of(*bounds, units, tokens), WASTE)


def test_invalid_keys_are_hidden() -> None:
    for units in range(1, 21):
        generator = torch.Generator().manual_seed(units)
        low, high = torch.randint(-1, units + 2, (2, 2, 17), generator=generator)
        valid = torch.rand(2, units, generator=generator) < (0.2, 0.8, 0.97)[units % 3]
        expected = table_of(low, high, units, 1) & valid[:, None]
        assert_paints(interval_rectangles(low, high, units, 1, valid), expected)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_random_tables(density: float) -> None:
    for rows, frames, tokens in ((1, 1, 1), (3, 9, 2), (20, 6, 3), (33, 17, 1), (5, 160, 2)):
        visible = torch.rand(2, rows, frames) < density
        assert_paints(dense_rectangles(visible, tokens), visible.repeat_interleave(tokens, -1), WASTE)


def test_scattered_frames_are_gathered_but_gaps_of_single_rows_are_masked() -> None:
    scattered = (torch.arange(400) % 2 == 0).expand(1, 2, -1)
    (rectangle,) = found = dense_rectangles(scattered, 2)
    assert rectangle.gathered is not None and rectangle.kind == "full"
    assert_paints(found, scattered.repeat_interleave(2, -1), 1.0)
    together = torch.ones(1, 6, 100, dtype=torch.bool)  # the rows see one run of frames, so there is no gap to skip
    for row in range(6):
        together[0, row, row + 1 : -1 : 9] = False
    (rectangle,) = found = dense_rectangles(together, 2)
    assert rectangle.gathered is None
    assert_paints(found, together.repeat_interleave(2, -1), WASTE)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("limits", [(1 << 22, 1 << 16), (1024, 30), (1024, 1 << 16)])
def test_gathered_frames_with_a_mask_stay_within_both_limits(
    limits: tuple[int, int], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rectangles, "MAX_MASK", limits[0])
    monkeypatch.setattr(rectangles, "MAX_GATHERED", limits[1])
    visible = (torch.arange(200) % 3 < 1).repeat(batch, 12, 1)
    visible &= torch.rand(batch, 12, 200) < 0.97
    found = dense_rectangles(visible, 5)  # the limit of a mask may cut through a frame
    assert any(rectangle.gathered is not None and rectangle.kind == "masked" for rectangle in found)
    assert all(rectangle.keys[1] <= limits[1] for rectangle in found)
    assert_paints(found, visible.repeat_interleave(5, -1), WASTE)


@pytest.mark.parametrize("batch", [1, 3])
def test_no_expanded_mask_exceeds_the_limit(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rectangles, "MAX_MASK", 1024)
    row = torch.arange(70).expand(batch, -1)
    zero = torch.zeros_like(row)
    assert_paints(interval_rectangles(zero, row // 2 + 1, 40, 60), table_of(zero, row // 2 + 1, 40, 60), WASTE)
    visible = (torch.rand(1, 70, 12) < 0.9).expand(batch, -1, -1)
    assert_paints(dense_rectangles(visible, 90), visible.repeat_interleave(90, -1), WASTE)


@pytest.mark.parametrize("form", ["intervals", "dense"])
def test_frame_mask_is_cut_to_the_frames_of_a_rank(form: str) -> None:
    first, last = torch.randint(0, 9, (2, 11)), torch.randint(0, 10, (2, 11))
    visible = table_of(first, last, 9, 1)
    mask = FrameMask.from_intervals(first, last, 3, 9) if form == "intervals" else FrameMask.from_dense(visible, 3)
    assert mask.shape == (2, 11)
    assert torch.equal(mask.any_frame_visible(), visible.any(-1))
    one, two = [((0, 9),), ((0, 4),), ((3, 8),), ((8, 9),)], [((0, 2), (5, 8)), ((1, 3), (8, 9))]
    out_of_order = [((6, 9), (0, 2)), ((1, 2), (7, 9), (2, 5), (6, 7))]  # in a mesh, of several ranks
    for frames in (*one, *two, *out_of_order):
        seen = visible[..., torch.cat([torch.arange(*span) for span in frames])]
        assert_paints(mask.rectangles(frames), seen.repeat_interleave(3, -1), WASTE)
        assert torch.equal(mask.any_frame_visible(frames), seen.any(-1))
        assert mask.visible_fraction(frames) == pytest.approx(float(seen.float().mean()))
    assert mask.rectangles(()) == () and not mask.any_frame_visible(()).any() and mask.visible_fraction(()) == 0
    rows = torch.tensor([7, 0, 3])
    taken, _ = paint(mask.take(rows).rectangles(((0, 9),)), 2, 3, 27)
    assert torch.equal(taken.bool(), visible[:, rows].repeat_interleave(3, -1))


@pytest.mark.parametrize(
    "first,stop,tokens,frames,message",
    [
        (ROWS, ROWS[:, :3], 2, 5, r"first is \(1, 4\)"),
        (ROWS[0], ROWS[0], 2, 5, r"integers of shape \(batch, query rows\)"),
        (ROWS.float(), ROWS.float(), 2, 5, "torch.float32"),
        (0, ROWS, 2, 5, "first is int, stop is Tensor"),
        (ROWS, ROWS + 6, 2, 5, "a row attends to frames 0 to 5, but there are 5 frames"),
        (ROWS - 1, ROWS + 1, 2, 5, "a row attends to frames -1 to 0"),
        (ROWS, ROWS, 0, 5, "tokens_per_frame=0"),
        (ROWS, ROWS, 2, -1, "frames=-1"),
        (ROWS, ROWS, True, 5, "tokens_per_frame=True"),
        (ROWS, ROWS, 2, False, "frames=False"),
        (ROWS, ROWS, 2.0, 5, "tokens_per_frame=2.0"),
    ],
)
def test_invalid_intervals_are_rejected(first, stop, tokens, frames, message) -> None:
    with pytest.raises(MaskError, match=message):
        FrameMask.from_intervals(first, stop, tokens, frames)


def test_invalid_tables_are_rejected_and_rows_that_see_nothing_may_have_any_bounds() -> None:
    for visible in (torch.ones(1, 4, 5), torch.ones(4, 5, dtype=torch.bool)):
        with pytest.raises(MaskError, match="must be bool of shape"):
            FrameMask.from_dense(visible, 2)
    # mPLUG-Owl3 marks samples without images with a stop of -1000000.
    mask = FrameMask.from_intervals(ROWS + 100, ROWS - 1_000_000, 2, 5)
    assert not mask.any_frame_visible().any() and mask.rectangles(((0, 5),)) == ()


def test_rows_seen_and_fractions_by_pair_of_ranks() -> None:
    """2 samples of 3 rows per rank; frame 0 is on rank 0, frames 1 and 2 are on rank 1."""
    first = torch.tensor([[1, 1, 1], [1, 0, 3]]), torch.zeros(2, 3).long()
    stop = torch.tensor([[2, 2, 3], [2, 1, 0]]), torch.tensor([[1, 3, 1], [1, 3, 1]])
    masks = [FrameMask.from_intervals(*pair, 4, 3) for pair in zip(first, stop, strict=True)]
    blocks = FrameBlockMasks(masks, [((0, 1),), ((1, 3),)])
    assert blocks.visible_row_counts() == [[1, 4], [6, 2]]
    assert blocks.visible_fractions() == [[pytest.approx(1 / 6), pytest.approx(5 / 12)], [1.0, pytest.approx(1 / 3)]]


def test_masks_are_equal_if_form_and_entries_are() -> None:
    first, stop = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    mask = FrameMask.from_intervals(first, stop, 4, 3)
    others = [FrameMask.from_intervals(first, stop + 1, 4, 4), FrameMask.from_intervals(first, stop, 5, 3)]
    others += [FrameMask.from_intervals(first, stop.clone().fill_(2), 4, 3), mask.take(torch.tensor([0]))]
    frames = torch.arange(3)
    others.append(FrameMask.from_dense((first[..., None] <= frames) & (frames < stop[..., None]), 4))
    assert mask.equals(FrameMask.from_intervals(first.clone(), stop.clone(), 4, 3))
    assert not any(mask.equals(other) for other in others)
