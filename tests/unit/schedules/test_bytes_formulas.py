"""Layer: pure Python. Byte formulas against the paper's number and the table of the algorithms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mllm_seqpar.schedules.bytes_sent import Problem, expanded, lv_xattn_bytes, ring_bytes, video_mme


def mean_ring_bytes(problem: Problem, backward: bool) -> float:
    ranks = (replace(problem, rank=rank) for rank in range(problem.ranks))
    return sum(sum(ring_bytes(p, backward=backward).values()) for p in ranks) / problem.ranks


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_video_mme_forward_has_the_papers_share_of_ring_bytes(ranks: int) -> None:
    """arXiv 2502.02406: 0.48% of Ring Attention's bytes. These numbers of ranks divide both lengths without padding."""
    problem = video_mme(ranks)
    assert problem.rows * ranks == 5514 and sum(problem.keys) == 1_739_394
    lv = sum(lv_xattn_bytes(problem, backward=False).values())
    assert lv == (ranks - 1) * problem.rows * 28 * (2 * 128 + 4 * 128 + 4)
    assert round(100 * lv / mean_ring_bytes(expanded(problem), False), 2) == 0.48
    # K and V with their 4 KV heads, not expanded to 28, take a seventh of the bytes.
    assert mean_ring_bytes(expanded(problem), False) == 7 * mean_ring_bytes(problem, False)


def test_video_mme_backward() -> None:
    problem = video_mme(6)
    lv = sum(lv_xattn_bytes(problem, backward=True).values())
    assert lv == 5 * problem.rows * 28 * (3 * 2 * 128 + 4 * 128 + 4)
    assert mean_ring_bytes(problem, True) == 5 * (2 * 2 + 2 * 4) * sum(problem.keys) / 6 * 4 * 128


def test_elements_of_even_shards_equal_the_table() -> None:
    n, s_q, s_kv, heads, groups, dim = 4, 10, 30, 6, 2, 8
    one_byte = Problem(rows=s_q, keys=(s_kv,) * n, heads=heads, kv_heads=groups, dim=dim, element=1, accumulated=1)

    def elements(sent: dict[str, int]) -> int:
        return sum(size // 4 if label == "lse" else size for label, size in sent.items())

    assert elements(lv_xattn_bytes(one_byte, backward=False)) == (n - 1) * s_q * heads * (dim + dim + 1)
    assert elements(lv_xattn_bytes(one_byte, backward=True)) == (n - 1) * s_q * heads * (4 * dim + 1)
    assert elements(ring_bytes(one_byte, backward=False)) == 2 * (n - 1) * s_kv * groups * dim
    assert elements(ring_bytes(one_byte, backward=True)) == 4 * (n - 1) * s_kv * groups * dim


@pytest.mark.parametrize("backward", [False, True])
def test_pruned_bytes_equal_the_ring_if_every_row_sees_every_rank(backward: bool) -> None:
    n, rows = 4, 10
    unshared = Problem(rows=rows, keys=(30,) * n, heads=6, kv_heads=2, dim=8, batch=3, key_batch=3, rank=2)
    for problem, count in ((unshared, rows), (replace(unshared, key_batch=1), 3 * rows)):
        ring = lv_xattn_bytes(problem, backward=backward)
        assert lv_xattn_bytes(problem, backward=backward, visible_rows=[[count] * n] * n) == ring
        pruned = [[count] * n] * n
        pruned[2] = [0, 0, count, 0]  # no row of rank 2 sees another rank, so it sends results only
        found = lv_xattn_bytes(problem, backward=backward, visible_rows=pruned)
        results = ("dq",) if backward else ("o", "lse")
        assert found == {label: size if label in results else 0 for label, size in ring.items()}


def test_one_rank_sends_nothing() -> None:
    problem = Problem(rows=8, keys=(100,), heads=4, kv_heads=2, dim=8)
    for backward in (False, True):
        assert not any((lv_xattn_bytes(problem, backward=backward) | ring_bytes(problem, backward=backward)).values())
