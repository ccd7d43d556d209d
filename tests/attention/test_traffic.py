"""Layer: pure Python. The formulas of what is sent, against the paper's number and the table of the algorithms."""

from __future__ import annotations

import pytest

from mllm_seqpar.schedules.bytes_sent import Problem, expanded, lv_xattn_bytes, ring_bytes, video_mme


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_video_mme_forward_is_the_papers_share_at_any_number_of_ranks(ranks: int) -> None:
    """arXiv 2502.02406: 0.48% of Ring Attention's bytes. These numbers of ranks divide both lengths: no padding."""
    problem = video_mme(ranks)
    assert problem.rows * ranks == 5514 and sum(problem.keys) == 1_739_394
    lv = sum(lv_xattn_bytes(problem, backward=False).values())
    assert lv == (ranks - 1) * problem.rows * 28 * (2 * 128 + 4 * 128 + 4)
    mean_ring = [
        sum(ring_bytes(Problem(**{**vars(expanded(problem)), "rank": r}), backward=False).values())
        for r in range(ranks)
    ]
    share = lv / (sum(mean_ring) / ranks)
    assert round(100 * share, 2) == 0.48
    # K and V that keep their 4 of 28 heads are 7 times less to send
    assert sum(ring_bytes(expanded(problem), backward=False).values()) == 7 * sum(
        ring_bytes(problem, backward=False).values()
    )
    assert round(100 * 7 * share, 1) == 3.3


def test_video_mme_backward() -> None:
    problem = video_mme(6)
    lv = sum(lv_xattn_bytes(problem, backward=True).values())
    assert lv == 5 * problem.rows * 28 * (3 * 2 * 128 + 4 * 128 + 4)
    ring = [sum(ring_bytes(Problem(**{**vars(problem), "rank": r}), backward=True).values()) for r in range(6)]
    assert sum(ring) == 6 * 5 * (2 * 2 + 2 * 4) * sum(problem.keys) // 6 * 4 * 128


def test_elements_of_even_shares_are_those_of_the_table() -> None:
    n, s_q, s_kv, heads, groups, dim = 4, 10, 30, 6, 2, 8
    one_byte = Problem(rows=s_q, keys=(s_kv,) * n, heads=heads, kv_heads=groups, dim=dim, element=1, accumulated=1)

    def elements(sent: dict[str, int]) -> int:
        return sum(size // 4 if label == "lse" else size for label, size in sent.items())

    assert elements(lv_xattn_bytes(one_byte, backward=False)) == (n - 1) * s_q * heads * (dim + dim + 1)
    assert elements(lv_xattn_bytes(one_byte, backward=True)) == (n - 1) * s_q * heads * (4 * dim + 1)
    assert elements(ring_bytes(one_byte, backward=False)) == 2 * (n - 1) * s_kv * groups * dim
    assert elements(ring_bytes(one_byte, backward=True)) == 4 * (n - 1) * s_kv * groups * dim


@pytest.mark.parametrize("backward", [False, True])
def test_rows_that_see_every_rank_send_what_goes_round_the_ring(backward: bool) -> None:
    n, rows = 4, 10
    apart = Problem(rows=rows, keys=(30,) * n, heads=6, kv_heads=2, dim=8, batch=3, key_batch=3, rank=2)
    shared = Problem(**{**vars(apart), "key_batch": 1})
    for problem, count in ((apart, rows), (shared, 3 * rows)):
        ring = lv_xattn_bytes(problem, backward=backward)
        assert lv_xattn_bytes(problem, backward=backward, visible_rows=[[count] * n] * n) == ring
        spared = [[count] * n] * n
        spared[2] = [0, 0, count, 0]  # no row of rank 2 sees another rank: it sends results only
        found = lv_xattn_bytes(problem, backward=backward, visible_rows=spared)
        results = ("dq",) if backward else ("o", "lse")
        assert found == {label: size if label in results else 0 for label, size in ring.items()}


def test_one_rank_sends_nothing() -> None:
    alone = Problem(rows=8, keys=(100,), heads=4, kv_heads=2, dim=8)
    for backward in (False, True):
        assert not any(lv_xattn_bytes(alone, backward=backward).values())
        assert not any(ring_bytes(alone, backward=backward).values())
