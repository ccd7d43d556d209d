"""Layer: pure Python. Byte formulas against the paper's number and the table of the algorithms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules import OverlapRatios
from mllm_seqpar.schedules.bytes_sent import (
    Problem,
    expanded,
    lv_xattn_bytes,
    overlap_ratios_by_bytes,
    ring_bytes,
    video_mme,
)
from mllm_seqpar.schedules.head_sharding import HeadShards
from mllm_seqpar.schedules.mesh_shapes import resolve_tile


def ring(problem: Problem, backward: bool) -> float:
    """The mean of all ranks."""
    ranks = (replace(problem, rank=rank) for rank in range(problem.ranks))
    return sum(sum(ring_bytes(p, backward=backward).values()) for p in ranks) / problem.ranks


def lv(problem: Problem, backward: bool) -> int:
    return sum(lv_xattn_bytes(problem, backward=backward).values())


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_video_mme_forward_has_the_papers_share_of_ring_bytes(ranks: int) -> None:
    """arXiv 2502.02406: 0.48% of Ring Attention's bytes. These numbers of ranks divide both lengths without padding."""
    problem = video_mme(ranks)
    assert problem.rows * ranks == 5514 and sum(problem.keys) == 1_739_394
    assert lv(problem, False) == (ranks - 1) * problem.rows * 28 * (2 * 128 + 4 * 128 + 4)
    assert lv(problem, True) == (ranks - 1) * problem.rows * 28 * (2 * 2 * 128 + 4 * 128 + 8)
    assert ring(problem, True) == (ranks - 1) * (2 * 2 + 2 * 4) * sum(problem.keys) / ranks * 4 * 128
    assert round(100 * lv(problem, False) / ring(expanded(problem), False), 2) == 0.48
    # K and V with their 4 KV heads, not expanded to 28, take a seventh of the bytes.
    assert ring(expanded(problem), False) == 7 * ring(problem, False)


def test_elements_of_even_shards_equal_the_table() -> None:
    n, s_q, s_kv, heads, groups, dim = 4, 10, 30, 6, 2, 8
    one_byte = Problem(rows=s_q, keys=(s_kv,) * n, heads=heads, kv_heads=groups, dim=dim, element=1, accumulated=1)
    lse = (n - 1) * s_q * heads * 3  # 4 bytes each, and so is delta
    assert lv(one_byte, False) - lse == (n - 1) * s_q * heads * (dim + dim + 1)
    assert lv(one_byte, True) - 2 * lse == (n - 1) * s_q * heads * (3 * dim + 2)
    assert ring(one_byte, False) == 2 * (n - 1) * s_kv * groups * dim
    assert ring(one_byte, True) == 4 * (n - 1) * s_kv * groups * dim


@pytest.mark.parametrize("keys", [7, 400])
def test_overlap_ratios_are_in_proportion_to_the_bytes(keys: int) -> None:
    """Batch 3, 5 heads, 11 rows, 2 KV heads, 2 samples of keys, dim 8; 2-byte inputs, 4-byte partial results."""
    options = {"rows": 11, "keys": (keys - 1, keys), "heads": 5, "kv_heads": 2, "dim": 8, "batch": 3, "key_batch": 2}
    sizes = {
        False: {"q": 165 * 16, "kv": 2 * 4 * keys * 16, "o": 165 * (32 + 4), "dkv": 0},
        True: {"q": 165 * (32 + 8), "kv": 2 * 4 * keys * 16, "o": 165 * 32, "dkv": 2 * 4 * keys * 32},
    }
    for backward, expected in sizes.items():
        largest = max(expected.values())
        ratios = {name: size / largest for name, size in expected.items()}
        assert overlap_ratios_by_bytes(Problem(**options), backward=backward) == OverlapRatios(**ratios)


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


def test_head_shards_repeat_kv_heads_only_where_query_heads_need_them() -> None:
    """3 query heads per KV head: 2 query heads per rank use KV heads (0 0), (0 1), (1 1)."""
    for heads, kv_heads, size, used, index in [
        (6, 2, 3, [[0], [0, 1], [1]], [None] * 3),
        (12, 4, 3, [[0, 1], [1, 2], [2, 3]], [[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]]),
        (12, 6, 3, [[0, 1], [2, 3], [4, 5]], [None] * 3),
        (24, 3, 4, [[0], [0, 1], [1, 2], [2]], [None, [0, 1, 1], [0, 0, 1], None]),
    ]:
        shards = HeadShards(heads, kv_heads, size)
        assert [list(shards.query_heads_of(r))[0] for r in range(size)] == list(range(0, heads, heads // size))
        assert [list(shards.kv_heads_of(rank)) for rank in range(size)] == used
        assert [shards.kv_head_index(rank) for rank in range(size)] == index
    for heads, size, largest in [(28, 8, 7), (12, 5, 4), (3, 4, 3), (7, 3, 1)]:
        with pytest.raises(ConfigError, match=f"{heads} query heads .* over {size} ranks; .* them is {largest}"):
            HeadShards(heads, 1, size)


@pytest.mark.parametrize(
    "strategy,tile,expected",
    [
        ("lv-xattn", None, ((6, 1), 1)),
        ("ring", None, ((1, 6), 1)),
        ("star", None, ((1, 1), 1)),
        ("ulysses", None, ((1, 1), 6)),
        ("ulysses", (3, 1), ((3, 1), 2)),
        ("mesh", (2, 3), ((2, 3), 1)),
        ("mesh", None, (None, 1)),
    ],
)
def test_mesh_shape_and_head_sharding_degree_of_each_strategy(strategy: str, tile: Any, expected: Any) -> None:
    assert resolve_tile(strategy, tile, 6) == expected
