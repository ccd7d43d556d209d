"""Layer: one process. Masks that make (row, rank) pairs empty: which rows are sent and computed."""

from __future__ import annotations

import itertools

import pytest
import torch

from attention_cases import Case, count_entries, frame_mask, run_case, visible_frames
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.masks import BlockMasks
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.sharding import frame_bounds, frame_spans, sequence_positions
from selections import slow_unless

WASTE = 1.3
"""The limit of entries computed on all ranks together, per visible entry."""


def masks_of(case: Case, n: int) -> BlockMasks:
    total = case.total(n)
    masks = [frame_mask(case, total, sequence_positions(total, rank, n, case.layout)) for rank in range(n)]
    assert all(masks)
    return frame_masks(masks, frame_spans(case.frames, n))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_rows_are_sent_point_to_point_only_if_some_pair_is_empty(n: int) -> None:
    def direct(mask: str, shared: bool = True, mesh_shape: tuple[int, int] = (n, 1)) -> bool:
        masks = masks_of(Case(op="lv", rows=10 * n, batch=2, frames=10, mask=mask), n)
        return CallSpec(mesh_shape, masks.folded() if shared else masks, (30 // n,) * n, torch.float32).direct

    assert not direct("all") and not direct("all", shared=False) and not direct("all but one")
    assert direct("one frame") == direct("nothing") == direct("own sample") == (n > 1)
    assert not direct("one frame", mesh_shape=(1, n)), "KV shards are sent, rows are not"
    if n == 2:  # each sample's frames are on one rank: a pair is empty only if the samples are distinguished
        assert not direct("own sample", shared=False)
    assert not CallSpec((n, 1), BlockMasks.full(2, 4, (0,) * n), (0,) * n, torch.float32).direct


def test_rows_that_are_sent_attend_to_some_key() -> None:
    case = Case(op="lv", rows=30, batch=2, frames=7, mask="far frame", layout="striped")
    n, total = 3, case.total(3)
    visible, masks = visible_frames(case, total), masks_of(case, n)
    for i, j in itertools.product(range(n), range(n)):
        start, stop = frame_bounds(case.frames, n)[j]
        rows = sequence_positions(total, i, n, case.layout)
        expected = visible[:, rows, start * case.tokens : stop * case.tokens].any(-1)
        for found, of_rank in ((masks, expected.any(0)), (masks.folded(), expected.flatten())):
            subset = found.visible_rows(i, j)
            index = torch.arange(of_rank.numel()) if subset is None else subset.index
            assert torch.equal(index, of_rank.nonzero().flatten()) and (subset is None) == bool(of_rank.all())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Score entries per head of every kernel call, on all ranks."""
    entries: list[int] = []
    count_entries(monkeypatch, lambda count, _: entries.append(count))
    return entries


@pytest.mark.parametrize("op,n", slow_unless(lambda row: row == ("lv", 3), [("lv", 3), ("ring", 2)]))
@pytest.mark.parametrize(
    "mask,frames",
    [
        *((mask, 9) for mask in ("random", "far frame", "growing", "own sample", "some rows", "holes")),
        pytest.param("holes", 150, marks=pytest.mark.slow),
        pytest.param("every third frame", 90 * 8, marks=pytest.mark.slow),
        ("random", 80),
    ],
)
def test_few_invisible_entries_are_computed(mask: str, frames: int, op: str, n: int, computed: list[int]) -> None:
    for batch, shared in ((2, False), (3, True)):
        for table in (False, True) if mask not in ("holes", "every third frame") else (True,):
            case = Case(op=op, rows=24, batch=batch, shared_keys=shared, mask=mask, frames=frames, table=table, dim=2)
            computed.clear()
            run_loopback(n, run_case, case)
            visible = int(visible_frames(case, case.total(n)).sum())
            assert 2 * visible <= sum(computed) <= WASTE * 2 * visible, (case, sum(computed) / (2 * visible))


def test_folded_batch_is_one_kernel_call(computed: list[int]) -> None:
    case = Case(op="lv", rows=8, batch=3, shared_keys=True)
    run_loopback(1, run_case, case)
    assert computed == [3 * 8 * 7 * 3] * 2
