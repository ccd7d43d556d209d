"""Layer: one process, then gloo ranks. Masks that hide whole ranks from rows: what is spared, and that it is exact."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from attention.cases import Case, assert_exact, frame_mask, over_gloo, run_case, same_bits, visible_frames
from mllm_seqpar.attention.block_math import BlockMath
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.masks import FrameBlockMasks, FullBlockMasks
from mllm_seqpar.sharding import frame_bounds, sequence_positions
from ranks import ranks

SIZES = (1, 2, 3, 4, 8)
WASTE = 1.3
"""Entries computed on all ranks together, per visible one, where rows see whole frames."""

MASKS = (
    ("one frame", False),
    ("one frame", True),
    ("far frame", False),
    ("far frame", True),
    ("same place", False),
    ("own sample", False),
    ("one sample in one place", False),
    ("one sample in one place", True),
    ("random", True),
    ("holes", False),
    ("all but one", False),
)
BATCHES = ((1, False), (2, False), (2, True), (3, True))


def cases(mask: str, table: bool, n: int) -> Iterable[Case]:
    for batch, shared in BATCHES:
        for groups, frames in ((4, 11), (1, 3)):
            yield Case(
                **{"op": "lv", "rows": 6 * n, "layout": "contiguous", "batch": batch, "shared_keys": shared},
                **{"groups": groups, "frames": frames, "mask": mask, "table": table},
            )


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("mask,table", MASKS)
def test_exact(mask: str, table: bool, n: int) -> None:
    for case in cases(mask, table, n):
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("batch,shared", BATCHES)
def test_one_row_to_a_rank(batch: int, shared: bool, n: int) -> None:
    for mask in ("one frame", "far frame"):
        case = Case(op="lv", rows=n, layout="contiguous", batch=batch, shared_keys=shared, mask=mask, frames=2 * n)
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["lv", "ring"])
def test_scattered_frames_are_gathered(op: str, n: int) -> None:
    for batch, shared in BATCHES:
        case = Case(op=op, rows=4 * n, batch=batch, shared_keys=shared, mask="every third frame", frames=80 * n)
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("mask", ["far frame", "one sample in one place", "own sample"])
def test_one_softmax_with_text_that_has_its_own_batch(mask: str, n: int) -> None:
    """The frames' part is folded into rows and pruned, the text's is not; their results merge in one place."""
    for layout, text in (("zigzag", "padded left"), ("striped", "window")):
        case = Case(op="joint", rows=19, batch=2, layout=layout, text=text, shared_keys=True, mask=mask)
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_causal_text_whose_keys_all_samples_share(layout: str, n: int) -> None:
    case = Case(op="causal", rows=8 * n, batch=3, layout=layout, shared_keys=True)
    assert_exact(case, run_loopback(n, run_case, case))


OVER_GLOO = [
    Case(op="lv", rows=24, layout="contiguous", mask="far frame", batch=2, shared_keys=True, frames=9),
    Case(op="lv", rows=24, layout="contiguous", mask="same place", batch=2, groups=4),
    Case(op="lv", rows=24, mask="one sample in one place", batch=2, shared_keys=True, table=True, groups=1),
    Case(op="joint", rows=19, mask="far frame", batch=2, shared_keys=True, text="padded"),
]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_exact_over_gloo(n: int) -> None:
    first, second = ranks(n).run(over_gloo, OVER_GLOO), ranks(n).run(over_gloo, OVER_GLOO, again=2)
    for i, case in enumerate(OVER_GLOO):
        results = [rank[i] for rank in first]
        assert_exact(case, results)
        assert same_bits(results, [rank[i] for rank in second])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_same_bits_run_to_run_and_with_or_without_overlap(n: int) -> None:
    for mask in ("far frame", "holes"):
        case = Case(op="lv", rows=24, batch=2, shared_keys=True, mask=mask, frames=9)
        first = run_loopback(n, run_case, case)
        assert same_bits(first, run_loopback(n, run_case, case))
        assert same_bits(first, run_loopback(n, run_case, Case(**{**vars(case), "overlap": False})))


def blocks_of(case: Case, n: int) -> FrameBlockMasks:
    total = case.total(n)
    masks = [frame_mask(case, total, sequence_positions(total, rank, n, case.layout)) for rank in range(n)]
    assert all(masks)
    return FrameBlockMasks(masks, frame_bounds(case.frames, n))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_rows_go_round_the_ring_unless_one_can_be_spared_a_trip(n: int) -> None:
    def straight(mask: str, shared: bool = True, tile: tuple[int, int] = (n, 1)) -> bool:
        blocks = blocks_of(Case(op="lv", rows=10 * n, batch=2, frames=10, mask=mask), n)
        return CallSpec(tile, blocks.folded() if shared else blocks, (30 // n,) * n, torch.float32).direct

    assert not straight("all") and not straight("all", shared=False) and not straight("all but one")
    assert straight("one frame") == straight("nothing") == straight("own sample") == (n > 1)
    assert not straight("one frame", tile=(1, n)), "where keys move, rows stay"
    if n == 2:  # each sample's frames are one rank's: only where samples are told apart is a row spared
        assert not straight("own sample", shared=False)
    assert not CallSpec((n, 1), FullBlockMasks(2, 4, (0,) * n), (0,) * n, torch.float32).direct


def test_the_rows_that_travel_are_those_that_see_something() -> None:
    case = Case(op="lv", rows=30, batch=2, frames=7, mask="far frame", layout="striped")
    n, total = 3, case.total(3)
    visible, blocks = visible_frames(case, total), blocks_of(case, n)
    for i, j in itertools.product(range(n), range(n)):
        start, stop = frame_bounds(case.frames, n)[j]
        seen = visible[:, sequence_positions(total, i, n, case.layout), start * case.tokens : stop * case.tokens].any(
            -1
        )
        for found, expected in ((blocks, seen.any(0)), (blocks.folded(), seen.flatten())):
            rows = found.rows(i, j)
            index = torch.arange(expected.numel()) if rows is None else rows.index
            assert torch.equal(index, expected.nonzero().flatten()) and (rows is None) == bool(expected.all())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Score entries per head of every kernel call, on all ranks."""
    entries: list[int] = []
    part_of = BlockMath._part

    def counting(self: BlockMath, *args: Any) -> Any:
        part = part_of(self, *args)
        *_, (q, k, _), options = part
        rows, keys = q.shape[2], k.shape[2]
        entries.append(q.shape[0] * (rows * (rows + 1) // 2 if options["causal"] else rows * keys))
        return part

    monkeypatch.setattr(BlockMath, "_part", counting)
    return entries


@pytest.mark.parametrize("op,n", [("lv", 1), ("lv", 3), ("lv", 8), ("ring", 4)])
@pytest.mark.parametrize(
    "mask,frames",
    [
        *((mask, 9) for mask in ("random", "one frame", "far frame", "growing", "own sample", "some rows", "holes")),
        ("holes", 150),
        ("every third frame", 90 * 8),
        ("random", 80),
    ],
)
def test_little_more_is_computed_than_what_is_visible(
    mask: str, frames: int, op: str, n: int, computed: list[int]
) -> None:
    for batch, shared in ((2, False), (3, True)):
        for table in (False, True) if mask not in ("holes", "every third frame") else (True,):
            case = Case(op=op, rows=24, batch=batch, shared_keys=shared, mask=mask, frames=frames, table=table, dim=2)
            computed.clear()
            run_loopback(n, run_case, case)
            visible = int(visible_frames(case, case.total(n)).sum())
            assert 2 * visible <= sum(computed) <= WASTE * 2 * visible, (case, sum(computed) / (2 * visible))


def test_folding_makes_one_kernel_call_of_one_for_each_sample(computed: list[int]) -> None:
    case = Case(op="lv", rows=8, batch=3, shared_keys=True)
    run_loopback(1, run_case, case)
    assert computed == [3 * 8 * 7 * 3] * 2
