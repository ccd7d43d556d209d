"""Layer: one process. Frame masks cut into tiles: disjoint, complete, bounded, and hardly anything computed in vain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from masks.painting import assert_paints, paint
from mllm_seqpar.masks import FrameMask, dense
from mllm_seqpar.masks import rectangles as tiles
from mllm_seqpar.masks.dense import dense_rectangles
from mllm_seqpar.masks.intervals import interval_rectangles

WASTE = 1.3
"""Entries computed per visible entry, for masks whose visible entries come in whole frames."""


def shown(low: Tensor, high: Tensor, units: int, tokens: int) -> Tensor:
    unit = torch.arange(units)
    return ((unit >= low[..., None]) & (unit < high[..., None])).repeat_interleave(tokens, -1)


def patterns(rows: int, units: int) -> dict[str, tuple[Tensor, Tensor]]:
    """First and last-plus-one unit of each row, by name; some reach beyond the block."""
    row = torch.arange(rows)
    zero, all_of_them = torch.zeros_like(row), torch.full_like(row, units)
    return {
        "everything": (zero, all_of_them),
        "nothing": (all_of_them, zero),
        "one per row": (row, row + 1),
        "two rows each": (row // 2, row // 2 + 1),
        "staircase": (zero, row + 1),
        "slow staircase": (zero, row // 3 + 1),
        "late staircase": (zero, row - rows // 2),
        "staircase down": (row, all_of_them),
        "window": (row - 2, row + 1),
        "every other row sees": (zero, torch.where(row % 2 == 0, units, 0)),
        "beyond the block": (row - units, row + units),
        "long gap": (zero, torch.where((row < 2) | (row > rows - 3), units, 0)),
        "random": (torch.randint(-2, units + 1, (rows,)), torch.randint(0, units + 3, (rows,))),
    }


NAMES = list(patterns(4, 4))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_intervals(name: str, tokens: int) -> None:
    for rows, units in ((1, 1), (2, 7), (9, 4), (24, 24), (40, 13)):
        low, high = (x[None] for x in patterns(rows, units)[name])
        assert_paints(interval_rectangles(low, high, units, tokens), shown(low, high, units, tokens), WASTE)


@pytest.mark.parametrize("tokens", [1, 3])
def test_intervals_that_differ_by_batch_item(tokens: int) -> None:
    table = patterns(12, 9)
    low = torch.stack([table[name][0] for name in NAMES])
    high = torch.stack([table[name][1] for name in NAMES])
    assert_paints(interval_rectangles(low, high, 9, tokens), shown(low, high, 9, tokens), WASTE)


def test_batch_items_that_see_alike_share_their_tiles() -> None:
    low, high = (x.expand(3, -1) for x in patterns(8, 8)["slow staircase"])
    found = interval_rectangles(low, high, 8, 2)
    assert {tile.batch for tile in found} == {(0, 3)}
    assert_paints(found, shown(low, high, 8, 2), WASTE)


@pytest.mark.parametrize("seed", range(30))
def test_random_intervals(seed: int) -> None:
    """Runs of equal, climbing and unrelated rows in any order: where the cutting of runs could lose or repeat a row."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows, units, tokens = number(1, 60), number(1, 20), number(1, 4)
    low, high = [], []
    while len(low) < rows:
        first, last, length = number(-1, units), number(-1, units + 2), number(1, 9)
        slope_low, slope_high = number(0, 2), number(0, 2)
        low += [first + slope_low * i for i in range(length)]
        high += [last + slope_high * i for i in range(length)]
    bounds = torch.tensor(low[:rows])[None], torch.tensor(high[:rows])[None]
    assert_paints(interval_rectangles(*bounds, units, tokens), shown(*bounds, units, tokens), WASTE)


@pytest.mark.parametrize("seed", range(20))
def test_holes_in_single_keys(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    units = 1 + seed
    low, high = torch.randint(-1, units + 2, (2, 2, 17), generator=generator)
    valid = torch.rand(2, units, generator=generator) < (0.2, 0.8, 0.97)[seed % 3]
    expected = shown(low, high, units, 1) & valid[:, None]
    assert_paints(interval_rectangles(low, high, units, 1, valid), expected)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_dense_tables(density: float) -> None:
    for rows, frames, tokens in ((1, 1, 1), (3, 9, 2), (20, 6, 3), (33, 17, 1), (5, 160, 2)):
        visible = torch.rand(2, rows, frames) < density
        assert_paints(dense_rectangles(visible, tokens), visible.repeat_interleave(tokens, -1), WASTE)


@pytest.mark.parametrize("name", NAMES)
def test_a_dense_table_and_intervals_say_the_same(name: str) -> None:
    low, high = (x[None] for x in patterns(21, 12)[name])
    visible = shown(low, high, 12, 1)
    assert_paints(dense_rectangles(visible, 4), visible.repeat_interleave(4, -1), WASTE)


def test_scattered_frames_are_one_tile_without_the_gaps() -> None:
    visible = torch.zeros(1, 2, 400, dtype=torch.bool)
    visible[:, :, ::2] = True
    (tile,) = found = dense_rectangles(visible, 2)
    assert tile.picked is not None and tile.kind == "full"
    assert_paints(found, visible.repeat_interleave(2, -1), 1.0)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("limits", [(1 << 22, 1 << 16), (1024, 30), (1024, 1 << 16)])
def test_scattered_frames_that_rows_see_nearly_alike(
    limits: tuple[int, int], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered and masked, also when neither the mask nor the gathered keys may be more than a few at a time."""
    monkeypatch.setattr(tiles, "MAX_MASK", limits[0])
    monkeypatch.setattr("masks.painting.MAX_MASK", limits[0])
    monkeypatch.setattr(dense, "MAX_PICKED", limits[1])
    visible = (torch.arange(200) % 3 < 1).repeat(batch, 12, 1)
    visible &= torch.rand(1 if batch == 1 else batch, 12, 200) < 0.97
    found = dense_rectangles(visible, 5)  # a mask's limit may cut through a frame
    assert any(tile.picked is not None and tile.kind == "masked" for tile in found)
    assert all(tile.keys[1] <= limits[1] for tile in found)
    assert_paints(found, visible.repeat_interleave(5, -1), WASTE)


def test_a_span_of_frames_of_which_rows_see_this_and_that_is_not_gathered() -> None:
    visible = torch.ones(1, 6, 100, dtype=torch.bool)
    for row in range(6):
        visible[0, row, row + 1 : -1 : 9] = False
    found = dense_rectangles(visible, 2)
    assert all(tile.picked is None for tile in found) and len(found) == 1
    assert_paints(found, visible.repeat_interleave(2, -1), WASTE)


@pytest.mark.parametrize("batch", [1, 3])
def test_no_mask_is_expanded_beyond_the_limit(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MAX_MASK", 1024)
    monkeypatch.setattr("masks.painting.MAX_MASK", 1024)
    row = torch.arange(70).expand(batch, -1)
    zero = torch.zeros_like(row)
    assert_paints(interval_rectangles(zero, row // 2 + 1, 40, 60), shown(zero, row // 2 + 1, 40, 60), WASTE)
    visible = (torch.rand(1, 70, 12) < 0.9).expand(batch, -1, -1)
    assert_paints(dense_rectangles(visible, 90), visible.repeat_interleave(90, -1), WASTE)


def test_what_nobody_sees_is_not_computed() -> None:
    """One frame per row out of 64: a mask over everything would compute 64 times as much."""
    row = torch.arange(64)[None]
    found = FrameMask.from_intervals(row, row + 1, 5, 64).tiles(0, 64)
    assert sum(tile.entries for tile in found) == 64 * 5
    assert FrameMask.from_intervals(row, row + 1, 5, 64).tiles(64, 64) == ()


@pytest.mark.parametrize("form", ["intervals", "dense"])
@pytest.mark.parametrize("start,stop", [(0, 9), (0, 4), (3, 8), (8, 9), (5, 5)])
def test_a_rank_sees_its_own_frames_of_the_mask(form: str, start: int, stop: int) -> None:
    first, last = torch.randint(0, 9, (2, 11)), torch.randint(0, 10, (2, 11))
    visible = shown(first, last, 9, 1)
    mask = FrameMask.from_intervals(first, last, 3, 9) if form == "intervals" else FrameMask.from_dense(visible, 3)
    assert mask.shape == (2, 11)
    assert torch.equal(mask.any_frame_visible(), visible.any(-1))
    if start == stop:
        assert mask.tiles(start, stop) == ()
    else:
        assert_paints(mask.tiles(start, stop), visible[..., start:stop].repeat_interleave(3, -1), WASTE)
    rows = torch.tensor([7, 0, 3])
    taken, _ = paint(mask.take(rows).tiles(0, 9), 2, 3, 27)
    assert torch.equal(taken.bool(), visible[:, rows].repeat_interleave(3, -1))
