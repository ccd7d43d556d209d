"""Layer: one process. Frame masks as intervals of keys, and their rectangles: few entries are computed in vain."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from painting import assert_cuts, assert_shows, table_of
from torch import Tensor

from mllm_seqpar.errors import MaskError
from mllm_seqpar.kernels.rectangles import rectangles_of
from mllm_seqpar.masks import FrameMask, Intervals
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.masks.intervals import runs_of

WASTE = 1.3
"""Entries computed per visible entry, for masks whose visible entries are whole frames."""

ROWS = torch.zeros(1, 4, dtype=torch.int64)


def assert_cuts_well(low: Tensor, high: Tensor, units: int, tokens: int) -> None:
    layer = Intervals(low * tokens, high * tokens, units * tokens)
    assert_cuts(layer, table_of(layer, layer.low.shape[0]), WASTE)


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
def test_rectangles_show_the_intervals(name: str) -> None:
    for rows, units, tokens in ((1, 1, 1), (2, 7, 3), (9, 4, 3), (24, 24, 1), (24, 24, 3), (40, 13, 1)):
        low, high = (x[None] for x in patterns(rows, units)[name])
        assert_cuts_well(low, high, units, tokens)


@pytest.mark.parametrize("tokens", [1, 3])
def test_batch_items_may_differ_and_equal_ones_share_rectangles(tokens: int) -> None:
    table = patterns(12, 9)
    low, high = (torch.stack([table[name][i] for name in NAMES]) for i in (0, 1))
    assert_cuts_well(low, high, 9, tokens)
    layer = Intervals(*(x.expand(3, -1) for x in table["slow staircase"]), 9)
    assert layer.low.shape == (1, 12) and {r.batch.start for r in rectangles_of(layer)} == {None}
    assert rectangles_of(layer) is rectangles_of(layer)


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
        found = rectangles_of(Intervals(2 * torch.tensor([low]), 2 * torch.tensor([high]), 18))
        assert [(r.rows.start, r.rows.stop, r.keys.start, r.keys.stop, r.kind) for r in found] == expected


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
        assert_cuts_well(torch.tensor(low[:rows])[None], torch.tensor(high[:rows])[None], units, tokens)


def test_facts_of_intervals() -> None:
    square = Intervals.causal(4)
    assert square.is_causal and not square.is_full and square.visible == 10 and square.span == (0, 4)
    assert square.common is None and not square.part(slice(1, 4)).is_causal
    assert square.part(slice(2, 3)).common == slice(0, 3) and square.part(keys=(2, 4)).span == (0, 2)
    one = Intervals(torch.tensor([[0]]), torch.tensor([[1]]), 1)
    assert one.is_full and one.is_causal
    same = Intervals(torch.full((2, 3), 2), torch.full((2, 3), 5), 9)
    assert same.common == slice(2, 5) and same.low.shape == (1, 3) and same.visible == 9
    none = Intervals(torch.full((1, 3), 7), torch.full((1, 3), 5), 9)
    assert none.visible == 0 and none.span == (0, 0) and none.common is None
    low, high = same.on(torch.device("cpu"))
    assert same.on(torch.device("cpu"))[0] is low and high.dtype is torch.int32


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_random_tables(density: float) -> None:
    for rows, frames, tokens in ((1, 1, 1), (3, 9, 2), (20, 6, 3), (33, 17, 1), (5, 60, 2)):
        visible = torch.rand(2, rows, frames) < density
        mask = FrameMask.from_dense(visible, tokens)
        assert torch.equal(mask.table(), visible)
        found = frame_masks([mask], [((0, frames),)]).block(0, 0)
        assert_shows(found, visible.repeat_interleave(tokens, -1))
        runs = max(
            len(list(group))
            for group in [[k for k, _ in itertools.groupby(r.tolist()) if k] for r in visible.flatten(0, 1)]
        )
        assert found is None or len(found) == runs


def test_a_block_has_as_many_layers_as_a_row_has_runs_in_it() -> None:
    """In the last frame, the second run of one row and the first of another are one layer."""
    visible = torch.tensor([[[1, 0, 1], [0, 0, 1], [1, 0, 0]]]).bool()
    mask = frame_masks([FrameMask.from_dense(visible, 2)], [((0, 2),), ((2, 3),)])
    for rank, frames in enumerate((slice(0, 2), slice(2, 3))):
        found = mask.block(0, rank)
        assert found is not None and len(found) == 1
        assert_shows(found, visible[..., frames].repeat_interleave(2, -1))


def test_intervals_narrowed_to_what_is_visible() -> None:
    low, high = torch.tensor([[9, 3, 9, 3, 9]]), torch.tensor([[0, 7, 0, 7, 0]])
    part, rows, keys = Intervals(low, high, 9).narrowed()
    assert part is not None and (rows, keys) == (slice(1, 4), slice(3, 7))
    assert part.low.tolist() == [[0, 0, 0]] and part.high.tolist() == [[4, 0, 4]] and part.keys == 4
    assert Intervals(low[:, 1:2], high[:, 1:2], 9).narrowed() == (None, slice(0, 1), slice(3, 7))
    square = Intervals.causal(4)
    assert square.narrowed() == (square, slice(0, 4), slice(0, 4))


def test_runs_of_a_table() -> None:
    visible = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert runs_of(visible).tolist() == [[[0, 0, 0], [1, 0, 4]], [[2, 0, 0], [4, 0, 0]]]
    assert runs_of(torch.zeros(2, 3, 0, dtype=torch.bool)).shape == (1, 2, 2, 3)


SIZES = {"equal": 3, "unequal": torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", ["intervals", "dense"])
def test_frame_mask_is_cut_to_the_frames_of_a_rank(form: str, sizes: str) -> None:
    first, last, tokens = torch.randint(0, 9, (2, 11)), torch.randint(0, 10, (2, 11)), SIZES[sizes]
    frame, repeats = torch.arange(9), torch.as_tensor(tokens).expand(9)
    visible = (first[..., None] <= frame) & (frame < last[..., None])
    if form == "dense":
        visible = torch.rand(2, 11, 9) < 0.6
    mask = (
        FrameMask.from_intervals(first, last, tokens, 9)
        if form == "intervals"
        else FrameMask.from_dense(visible, tokens)
    )
    assert mask.shape == (2, 11)
    assert torch.equal(mask.any_frame_visible(), visible.any(-1))
    one, two = [((0, 9),), ((0, 4),), ((3, 8),), ((8, 9),), ()], [((0, 2), (5, 8)), ((1, 3), (8, 9))]
    out_of_order = [((6, 9), (0, 2)), ((1, 2), (7, 9), (2, 5), (6, 7))]  # in a mesh, of several ranks
    rows = torch.tensor([7, 0, 3])
    for frames in (*one, *two, *out_of_order):
        held = torch.cat([torch.arange(*span) for span in frames] or [torch.arange(0)])
        seen = visible[..., held].repeat_interleave(repeats[held], -1)
        blocks = frame_masks([mask, mask.take(rows)], [frames])
        assert_shows(blocks.block(0, 0), seen)
        assert_shows(blocks.block(1, 0), seen[:, rows])
        assert_shows(blocks.folded().block(0, 0), seen.flatten(0, 1)[None])
        subset = blocks.visible_rows(0, 0)
        index = torch.arange(11) if subset is None else subset.index
        assert torch.equal(index, seen.any(-1).any(0).nonzero().flatten())
        assert_shows(blocks.block(0, 0, pruned=True), seen[:, index])
        fraction = float(seen.float().mean()) if frames else 0.0
        assert blocks.visible_fractions()[0] == [pytest.approx(fraction)]


def test_ranks_merged_by_ulysses_have_one_frame_range_after_another() -> None:
    sizes, frames = SIZES["unequal"], [((0, 2), (7, 9)), ((2, 4), (6, 7)), ((4, 5),), ((5, 6),)]
    first, last = torch.randint(0, 9, (4, 2, 3)), torch.randint(0, 10, (4, 2, 3))
    masks = [FrameMask.from_intervals(a, b, sizes, 9) for a, b in zip(first, last, strict=True)]
    merged = frame_masks(masks, frames).merged(((0, 1), (2, 3)), None)
    frame = torch.arange(9)
    for i, j in itertools.product(range(2), repeat=2):
        low, high = (torch.cat([x[2 * i], x[2 * i + 1]], dim=1)[..., None] for x in (first, last))
        held = torch.cat([torch.arange(*span) for span in (*frames[2 * j], *frames[2 * j + 1])])
        visible = ((low <= frame) & (frame < high))[..., held].repeat_interleave(sizes[held], -1)
        assert_shows(merged.block(i, j), visible)


@pytest.mark.parametrize(
    "first,stop,tokens,frames,message",
    [
        (ROWS, ROWS[:, :3], 2, 5, r"first is \(1, 4\)"),
        (ROWS[0], ROWS[0], 2, 5, r"integers of shape \(batch, query rows\)"),
        (ROWS.float(), ROWS.float(), 2, 5, "torch.float32"),
        (0, ROWS, 2, 5, "first is int, stop is .* tensors of integers"),
        (ROWS, ROWS + 6, 2, 5, "a row attends to frames 0 to 5, but there are 5 frames"),
        (ROWS - 1, ROWS + 1, 2, 5, "a row attends to frames -1 to 0"),
        (ROWS, ROWS, 0, 5, "tokens_per_frame=0"),
        (ROWS, ROWS, 2, -1, "frames=-1"),
        (ROWS, ROWS, True, 5, "tokens_per_frame=True"),
        (ROWS, ROWS, 2, False, "frames=False"),
        (ROWS, ROWS, 2.0, 5, "tokens_per_frame=2.0"),
        (ROWS, ROWS, torch.ones(4).long(), 5, r"tokens_per_frame is \(4,\) torch.int64; expected \(5,\) integers"),
        (ROWS, ROWS, torch.ones(5), 5, r"tokens_per_frame is \(5,\) torch.float32"),
        (ROWS, ROWS, torch.tensor([1, 2, 0, 4, 5]), 5, "a frame of 0 tokens; every frame needs at least 1"),
        (ROWS, ROWS, torch.tensor([1, -2, 3, 4, 5]), 5, "a frame of -2 tokens"),
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
    assert not mask.any_frame_visible().any() and frame_masks([mask], [((0, 5),)]).block(0, 0) == ()


def test_rows_seen_and_fractions_by_pair_of_ranks() -> None:
    """2 samples of 3 rows per rank; frame 0 is on rank 0, frames 1 and 2 are on rank 1."""
    first = torch.tensor([[1, 1, 1], [1, 0, 3]]), torch.zeros(2, 3).long()
    stop = torch.tensor([[2, 2, 3], [2, 1, 0]]), torch.tensor([[1, 3, 1], [1, 3, 1]])
    masks = [FrameMask.from_intervals(*pair, 4, 3) for pair in zip(first, stop, strict=True)]
    blocks = frame_masks(masks, [((0, 1),), ((1, 3),)])
    assert blocks.visible_row_counts() == [[1, 4], [6, 2]]
    assert blocks.visible_fractions() == [[pytest.approx(1 / 6), pytest.approx(5 / 12)], [1.0, pytest.approx(1 / 3)]]


def test_masks_are_equal_if_entries_and_sizes_are() -> None:
    first, stop = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    mask = FrameMask.from_intervals(first, stop, 4, 3)
    others = [FrameMask.from_intervals(first, stop + 1, 4, 4), FrameMask.from_intervals(first, stop, 5, 3)]
    others += [FrameMask.from_intervals(first, stop.clone().fill_(2), 4, 3), mask.take(torch.tensor([0]))]
    others.append(FrameMask.from_intervals(first, stop, torch.tensor([4, 4, 5]), 3))
    frames = torch.arange(3)
    same = [FrameMask.from_dense((first[..., None] <= frames) & (frames < stop[..., None]), 4)]
    same += [FrameMask.from_intervals(first.clone(), stop.clone(), torch.full((3,), 4), 3)]
    assert all(mask.equals(other) for other in same)
    assert not any(mask.equals(other) for other in others)
