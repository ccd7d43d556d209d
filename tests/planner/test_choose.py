"""Layer: pure Python. The choice of a strategy on both sides of each crossover, and who may be chosen at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import with_

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import ParallelSpec, SelectionOptions, Visual, choose
from mllm_seqpar.planner.candidates import ways
from mllm_seqpar.schedules.bytes_sent import Problem

REAL = with_(
    attention_forward=1e14,
    attention_backward=1e14,
    matmul=2e14,
    node_link=2e11,
    network_link=1e10,
    node_latency_s=5e-6,
    network_latency_s=2e-5,
    block_overhead_s=1e-5,
)


def problem(rows: int, keys: int, ranks: int = 8, heads: int = 28, kv_heads: int = 4) -> Problem:
    return Problem(rows=rows, keys=(keys,) * ranks, heads=heads, kv_heads=kv_heads, dim=128)


RINGS = SelectionOptions(strategies=("lv-xattn", "ring"))


def test_few_rows_move_and_few_keys_move() -> None:
    assert choose(problem(64, 100_000), REAL, options=RINGS).strategy == "lv-xattn"
    assert choose(problem(4096, 512), REAL, options=RINGS).strategy == "ring"


def test_in_between_a_tile_sends_less() -> None:
    apart = with_(REAL, gpus_per_node=1, network_link=2e9)
    found = choose(problem(2048, 4 * 2048, ranks=16), apart, options=SelectionOptions(hybrid=False))
    assert found.strategy == "mesh" and found.tile[0] * found.tile[1] == 16 and 1 < found.tile[0] < 16
    rings = [c.seconds for c in found.table if c.way.strategy in ("lv-xattn", "ring")]
    assert found.seconds < min(rings)


def test_short_visual_input_on_fast_links_is_replicated_and_long_is_not() -> None:
    visual = Visual(dim=1024, layers=8)
    short = choose(problem(256, 64), with_(REAL, gpus_per_node=8), options=SelectionOptions(visual=visual))
    assert short.strategy == "replicate"
    long = choose(problem(256, 64_000), with_(REAL, gpus_per_node=8), options=SelectionOptions(visual=visual))
    assert long.strategy == "lv-xattn"


def test_ulysses_wins_where_latency_counts_and_heads_divide() -> None:
    fast = with_(REAL, gpus_per_node=8, node_latency_s=1e-3)
    options = SelectionOptions(strategies=("lv-xattn", "ring", "mesh", "ulysses"), hybrid=False)
    assert choose(problem(256, 256, heads=32), fast, options=options).strategy == "ulysses"
    found = choose(problem(256, 256, heads=28), fast, options=options)  # 8 does not divide 28
    assert found.strategy != "ulysses" and all(c.way.strategy != "ulysses" for c in found.table)


def test_equal_costs_choose_lv_xattn() -> None:
    alone = choose(problem(64, 64, ranks=1), REAL)
    assert (alone.strategy, alone.tile) == ("lv-xattn", (1, 1))
    hidden = choose(problem(2048, 2048), with_(REAL, node_link=1e15, network_link=1e15, network_latency_s=0.0))
    assert hidden.strategy == "lv-xattn"  # all are equal but for less than the margin
    near = problem(1024, 512)
    assert choose(near, REAL, options=RINGS).strategy == "ring"
    assert choose(near, REAL, options=replace(RINGS, margin=30.0)).strategy == "lv-xattn"


def test_legal_ways() -> None:
    found = list(ways(problem(8, 8, ranks=8, heads=12)))
    assert (
        ParallelSpec("lv-xattn", (8, 1)) in found
        and ParallelSpec("ring", (1, 8)) in found
        and ParallelSpec("mesh", (4, 2)) in found
    )
    groups = {way.head_degree for way in found if way.strategy == "ulysses"}
    assert groups == {2, 4}  # 8 does not divide 12 heads
    assert {way.tile for way in found if way.head_degree == 2} == {(1, 4), (2, 2), (4, 1)}
    with pytest.raises(ConfigError, match="star cannot be planned; choose of lv-xattn, ring"):
        choose(problem(8, 8), REAL, options=SelectionOptions(strategies=("lv-xattn", "star")))
    with pytest.raises(ConfigError, match="none of ulysses is legal for 7 heads on 8 ranks"):
        choose(problem(8, 8, heads=7, kv_heads=1), REAL, options=SelectionOptions(strategies=("ulysses",)))


def test_the_choice_says_why_and_holds_all_candidates() -> None:
    found = choose(problem(64, 100_000), REAL)
    assert found.why.startswith("lv-xattn: ") and "64 rows, 800000 keys, 8 ranks" in found.why and "\n" not in found.why
    assert [c.seconds for c in found.table] == sorted(c.seconds for c in found.table)
    assert len(found.table) == len(list(ways(problem(64, 100_000))))
    assert found == choose(problem(64, 100_000), REAL)


def test_a_mask_that_prunes_favours_the_straight_way() -> None:
    """Rows that see only their own rank's keys: nothing travels."""
    base, n = problem(4096, 4096), 8
    own = [[1.0 if i == j else 0.0 for j in range(n)] for i in range(n)]
    seen = [[4096 if i == j else 0 for j in range(n)] for i in range(n)]
    found = choose(base, REAL, options=replace(RINGS, visible=own, seen=seen))
    assert found.strategy == "lv-xattn" and found.table[0].sent == 0
