"""Layer: one process, then gloo ranks. The bytes that the transfer layer counts are those of the formulas."""

from __future__ import annotations

import pytest
import torch

from attention.cases import Case, over_gloo, run_case, visible_frames
from mllm_seqpar.attention import decode_attention
from mllm_seqpar.attention.decode import SCATTER_ROWS
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.schedules.bytes_sent import Problem, lv_xattn_bytes, mesh_bytes, ring_bytes, ulysses_bytes
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of
from mllm_seqpar.sharding import frame_bounds, sequence_positions
from ranks import ranks

SIZES = range(1, 9)
CONTROL = ("agreement", "mask")
"""What is sent to make sure that ranks agree and know each other's masks: a few numbers, beside the formulas."""

CASES = [
    Case(op="lv"),
    Case(op="lv", frames=8, batch=2, groups=1, dtype=torch.bfloat16),  # O and dQ in float32 beside 2-byte Q
    Case(op="lv", frames=8, mask="all", batch=2),  # a mask that hides no rank from any row: round the ring
    Case(op="lv", frames=17, mask="all but one", batch=2, shared_keys=True),
    Case(op="lv", frames=2, mask="growing", batch=2, shared_keys=True),  # ranks without frames, of which none sees any
    Case(op="lv", rows=50, frames=11, mask="one frame", batch=2, shared_keys=True, dtype=torch.bfloat16),
    Case(op="lv", rows=32, frames=13, mask="random", batch=2, groups=1),  # rows are spared that no batch item needs
    Case(op="lv", rows=32, frames=9, mask="holes", batch=2, shared_keys=True, accumulate=None),
    Case(op="lv", rows=32, frames=9, mask="own sample", batch=3, shared_keys=True),
    Case(op="lv", rows=32, frames=9, mask="some rows", table=True, batch=2),
    Case(op="lv", mask="nothing"),
    Case(op="lv", dtype=torch.bfloat16, accumulate=None),
    Case(op="lv", dtype=torch.float64, frames=3),
    Case(op="ring"),
    Case(op="ring", frames=2, batch=2, groups=1, dtype=torch.bfloat16),  # uneven frames, ranks without any
    Case(op="ring", frames=9, mask="holes", batch=2, shared_keys=True),
    Case(op="ring", dtype=torch.bfloat16, accumulate=None),
    Case(op="causal", rows=48, groups=4, dtype=torch.bfloat16),
]
TILED_CASES = [
    Case(op="mesh", dtype=torch.bfloat16, frames=5, batch=2),
    Case(op="mesh", frames=9, mask="holes", batch=2, shared_keys=True, groups=1),
    Case(op="causal", by="mesh", rows=48, layout="striped", dtype=torch.bfloat16, accumulate=None),
    Case(op="ulysses", heads=24, groups=24, frames=5, dtype=torch.bfloat16, batch=2),
    Case(op="ulysses", heads=24, groups=8, frames=9, mask="holes", batch=2, shared_keys=True),
    Case(op="ulysses", heads=24, groups=1, dtype=torch.bfloat16),
    Case(op="causal", by="ulysses", rows=48, heads=24, groups=4),
]


def problem(case: Case, n: int, rank: int) -> Problem:
    total = case.total(n)
    keys = [(stop - start) * case.tokens for start, stop in frame_bounds(case.frames, n)]
    if case.op == "causal":
        keys = [total // n] * n
    return Problem(
        rows=total // n,
        keys=tuple(keys),
        heads=case.heads,
        kv_heads=case.groups,
        dim=case.dim,
        batch=case.batch,
        key_batch=1 if case.shared_keys else case.batch,
        rank=rank,
        element=case.dtype.itemsize,
        accumulated=torch.promote_types(case.accumulate or case.dtype, case.dtype).itemsize,
    )


def rows_that_see(case: Case, n: int) -> list[list[int]] | None:
    """How many rows of rank i see any key of rank j: counted in the dense mask."""
    total = case.total(n)
    visible = visible_frames(case, total)
    if visible is None:
        return None
    sees = torch.stack(
        [
            visible[..., start * case.tokens : stop * case.tokens].any(-1)
            for start, stop in frame_bounds(case.frames, n)
        ],
        dim=-1,
    )
    if not case.shared_keys:
        sees = sees.any(0, keepdim=True)
    by_rank = [sequence_positions(total, rank, n, case.layout) for rank in range(n)]
    return [sees[:, rows].sum((0, 1)).tolist() for rows in by_rank]


def expected_bytes(case: Case, n: int, rank: int, *, backward: bool) -> dict[str, int]:
    by = case.by if case.op == "causal" else case.op
    if by == "lv" or (by == "mesh" and case.tile == (n, 1) and case.mask is not None):
        sent = lv_xattn_bytes(problem(case, n, rank), backward=backward, visible_rows=rows_that_see(case, n))
    elif by == "mesh":
        sent = mesh_bytes(problem(case, n, rank), case.tile or (n, 1), backward=backward)
    elif by == "ulysses":
        sent = ulysses_bytes(problem(case, n, rank), case.tile or (1, 1), backward=backward)
    else:
        sent = ring_bytes(problem(case, n, rank), backward=backward)
    if case.dtype is torch.float64 and "lse" in sent:
        sent["lse"] *= 2  # float64 log-sum-exp
    return {label: b for label, b in sent.items() if b}


def assert_counted(case: Case, n: int, results: list[dict]) -> None:
    for rank, result in enumerate(results):
        for backward in (False, True):
            sent = dict(result["backward" if backward else "forward"])
            control = sum(sent.pop(label, 0) for label in CONTROL)
            assert control == 0 if backward else control < 4096 * n
            expected = expected_bytes(case, n, rank, backward=backward)
            assert {label: b for label, b in sent.items() if b} == expected, (rank, backward)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_counted_bytes_are_those_of_the_formulas(case: Case, n: int) -> None:
    assert_counted(case, n, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("case", TILED_CASES)
def test_counted_bytes_of_all_tiles_and_hybrids(case: Case, n: int) -> None:
    by_heads = "ulysses" in (case.op, case.by)
    parts = [part for part in range(1, n + 1) if n % part == 0 and 24 % (n // part) == 0] if by_heads else [n]
    for tile in (tile for part in parts for tile in mesh_shapes_of(part)):
        if by_heads and case.mask is not None and tile[0] > 1 == tile[1]:
            continue  # rows then go straight, as few as the mask lets see; the formula is LV-XAttn's
        tiled = Case(**{**vars(case), "tile": tile})
        assert_counted(tiled, n, run_loopback(n, run_case, tiled))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rows_that_see_one_frame_travel_once_at_most(n: int) -> None:
    """The ring takes every row past n - 1 ranks; here a row has one rank to go to, or none but its own."""
    case = Case(op="lv", rows=16 * n, frames=2 * n, mask="one frame", layout="contiguous")
    seen = rows_that_see(case, n)
    for backward in (False, True):
        ring = sum(lv_xattn_bytes(problem(case, n, 0), backward=backward).values()) * n
        sent = sum(
            sum(lv_xattn_bytes(problem(case, n, rank), backward=backward, visible_rows=seen).values())
            for rank in range(n)
        )
        assert sent == ring // n, "each rank's rows see all ranks equally often"


@pytest.mark.parametrize("n", [2, 4, 8])
def test_samples_whose_frames_lie_with_their_rows_send_nothing(n: int) -> None:
    """Row and frame of a video move together: rows near a rank's frames see that rank alone."""
    case = Case(op="lv", rows=8 * n, frames=2 * n, mask="same place", layout="contiguous")
    for result in run_loopback(n, run_case, case):
        assert set(result["forward"]) <= set(CONTROL) and not result["backward"]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("mask", [None, "far frame"])
def test_a_joint_softmax_sends_the_sum_of_its_parts(mask: str | None, n: int) -> None:
    case = Case(op="joint", rows=32, batch=2, shared_keys=True, mask=mask)
    seen = rows_that_see(case, n)
    for rank, result in enumerate(run_loopback(n, run_case, case)):
        frames, text = (
            problem(case, n, rank),
            problem(Case(**{**vars(case), "op": "causal", "shared_keys": False}), n, rank),
        )
        for backward in (False, True):
            parts = lv_xattn_bytes(frames, backward=backward, visible_rows=seen), ring_bytes(text, backward=backward)
            sent = {k: b for k, b in result["backward" if backward else "forward"].items() if k not in CONTROL}
            assert sum(sent.values()) == sum(map(sum, (p.values() for p in parts)))


def decode(comm: Communicator, rows: int) -> dict[str, int]:
    x = torch.randn(2, 4, rows, 8)
    with torch.no_grad():
        decode_attention(x, x[:, :2], x[:, :2], group=comm)
    return dict(comm.bytes.sent)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_decoding_sends_results_only(n: int) -> None:
    """Few rows: (n - 1) of (O, log-sum-exp). Many rows: 2 (n - 1)/n of them, however many ranks there are."""
    row = 2 * 4 * (8 + 1) * 4
    few, many = 3, SCATTER_ROWS + 1
    share = -(-many // n)
    for sent in run_loopback(n, decode, few):
        assert sum(sent.values()) == (n - 1) * few * row
    for sent in run_loopback(n, decode, many):
        assert sum(sent.values()) == 2 * (n - 1) * share * row


@pytest.mark.parametrize("n", [2, 3, 4])
def test_counted_bytes_over_gloo(n: int) -> None:
    by_rank = ranks(n).run(over_gloo, CASES)
    for i, case in enumerate(CASES):
        assert_counted(case, n, [results[i] for results in by_rank])
