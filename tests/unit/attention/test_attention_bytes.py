"""Layer: one process. The transfer layer counts exactly the bytes of the formulas, for every strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_bytes_cases import CONTROL, assert_counted, expected_bytes, problem, visible_row_counts
from attention_cases import Case, run_case
from mllm_seqpar.attention import decode_attention
from mllm_seqpar.attention.joint import SCATTER_ROWS
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.schedules.bytes_sent import lv_xattn_bytes, ring_bytes
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of

CASES = [
    Case(op="lv"),
    Case(op="lv", frames=8, batch=2, groups=1, dtype=torch.bfloat16),  # O and dQ in float32 beside 2-byte Q
    Case(op="lv", frames=8, mask="all", batch=2),  # no (row, rank) pair is empty: a ring
    Case(op="lv", frames=17, mask="all but one", batch=2, shared_keys=True),
    Case(op="lv", frames=2, mask="growing", batch=2, shared_keys=True),  # ranks without frames
    Case(op="lv", rows=50, frames=11, mask="one frame", batch=2, shared_keys=True, dtype=torch.bfloat16),
    Case(op="lv", rows=32, frames=13, mask="random", batch=2, groups=1),  # rows that no batch item needs are not sent
    Case(op="lv", rows=32, frames=9, mask="holes", batch=2, shared_keys=True, accumulate=None),
    Case(op="lv", rows=32, frames=9, mask="own sample", batch=3, shared_keys=True),
    Case(op="lv", rows=32, frames=9, mask="some rows", table=True, batch=2),
    Case(op="lv", mask="nothing"),
    Case(op="lv", dtype=torch.bfloat16, accumulate=None),
    Case(op="lv", dtype=torch.float64, frames=3),
    Case(op="lv", dtype=torch.bfloat16, accumulate=torch.float32),
    Case(op="lv", rows=32, frames=11, mask="random", dtype=torch.bfloat16, accumulate=torch.float32),
    Case(op="direct", frames=8, batch=2, dtype=torch.bfloat16),
    Case(op="direct", frames=9, batch=2, shared_keys=True, dtype=torch.bfloat16, accumulate=torch.float32),
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
    Case(op="ulysses", heads=24, groups=1, dtype=torch.bfloat16, accumulate=torch.float32),
    Case(op="causal", by="ulysses", rows=48, heads=24, groups=4),
]


@pytest.mark.parametrize("n", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_counted_bytes_equal_formulas(case: Case, n: int) -> None:
    assert_counted(case, n, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", [4, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", TILED_CASES)
def test_counted_bytes_of_all_mesh_shapes_and_hybrids(case: Case, n: int) -> None:
    head_sharded = "ulysses" in (case.op, case.by)
    parts = [part for part in range(1, n + 1) if n % part == 0 and 24 % (n // part) == 0] if head_sharded else [n]
    for tile in (tile for part in parts for tile in mesh_shapes_of(part)):
        if head_sharded and case.mask is not None and tile[0] > 1 == tile[1]:
            continue  # rows are then sent point to point; their formula is LV-XAttn's
        tiled = replace(case, tile=tile)
        assert_counted(tiled, n, run_loopback(n, run_case, tiled))


@pytest.mark.parametrize("n", [2, 4])
def test_rows_are_sent_only_to_ranks_with_a_visible_frame(n: int) -> None:
    """A ring sends every row past n - 1 ranks; with one visible frame, a row is sent to one rank or to none."""
    case = Case(op="lv", rows=16 * n, frames=2 * n, mask="one frame", layout="contiguous")
    for backward in (False, True):
        ring = sum(lv_xattn_bytes(problem(case, n, 0), backward=backward).values()) * n
        sent = sum(sum(expected_bytes(case, n, rank, backward=backward).values()) for rank in range(n))
        assert sent == ring // n, "the rows of each rank attend to all ranks equally often"
    for result in run_loopback(n, run_case, replace(case, rows=8 * n, mask="same place")):
        assert set(result["forward"]) <= set(CONTROL) and not result["backward"], "rows attend to local frames only"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", [None, "far frame"])
def test_joint_softmax_sends_the_sum_of_its_sources(mask: str | None, n: int) -> None:
    case = Case(op="joint", rows=32, batch=2, shared_keys=True, mask=mask)
    text_case, visible = replace(case, op="causal", shared_keys=False), visible_row_counts(case, n)
    for rank, result in enumerate(run_loopback(n, run_case, case)):
        for backward in (False, True):
            frames = lv_xattn_bytes(problem(case, n, rank), backward=backward, visible_rows=visible)
            text = ring_bytes(problem(text_case, n, rank), backward=backward)
            sent = result["backward" if backward else "forward"]
            payload = sum(size for label, size in sent.items() if label not in CONTROL)
            assert payload == sum(frames.values()) + sum(text.values())


def decode(comm: Communicator, rows: int) -> int:
    x = torch.randn(2, 4, rows, 8)
    with torch.no_grad():
        decode_attention(x, x[:, :2], x[:, :2], group=comm)
    return sum(size for label, size in comm.bytes.sent.items() if label not in CONTROL)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_decoding_sends_results_only(n: int) -> None:
    """Few rows: (n - 1) of (O, log-sum-exp). Many rows: 2 (n - 1)/n of them, for any number of ranks."""
    row, many = 2 * 4 * (8 + 1) * 4, SCATTER_ROWS + 1
    assert run_loopback(n, decode, 3) == [(n - 1) * 3 * row] * n
    assert run_loopback(n, decode, many) == [2 * (n - 1) * -(-many // n) * row] * n
