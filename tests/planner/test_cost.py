"""Layer: pure Python. Costs of calls against closed formulas, their bytes against the traffic formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import with_

from mllm_seqpar.planner import ParallelSpec, Visual, call_cost, overlap_ratios_by_rates
from mllm_seqpar.planner.candidates import period_of, ways
from mllm_seqpar.schedules.bytes_sent import Problem, lv_xattn_bytes, mesh_bytes, ring_bytes, ulysses_bytes

EVEN = Problem(rows=64, keys=(4096,) * 8, heads=8, kv_heads=2, dim=64)
ONE_NODE = with_(gpus_per_node=8)
LV, RING = ParallelSpec("lv-xattn", (8, 1)), ParallelSpec("ring", (1, 8))


def flops(problem: Problem, backward: bool) -> float:
    return (10 if backward else 4) * problem.rows * sum(problem.keys) * problem.heads * problem.dim


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("way", [LV, RING, ParallelSpec("mesh", (2, 4)), ParallelSpec("mesh", (4, 2))], ids=str)
def test_long_computation_hides_everything(way: ParallelSpec, backward: bool) -> None:
    slow = with_(ONE_NODE, attention_forward=1e8, attention_backward=1e8)
    cost = call_cost(EVEN, way, slow, backward=backward)
    assert cost.seconds == pytest.approx(flops(EVEN, backward) / 1e8, rel=1e-6)
    assert cost.attention == pytest.approx(cost.seconds) and cost.exposed == pytest.approx(0, abs=1e-6)
    assert cost.hidden > 0


@pytest.mark.parametrize("backward", [False, True])
def test_short_computation_leaves_the_bytes(backward: bool) -> None:
    fast = with_(ONE_NODE, attention_forward=1e18, attention_backward=1e18)
    lv, ring = (call_cost(EVEN, way, fast, backward=backward) for way in (LV, RING))
    assert lv.seconds == pytest.approx(sum(lv_xattn_bytes(EVEN, backward=backward).values()) / 1e9, rel=1e-3)
    assert ring.seconds == pytest.approx(sum(ring_bytes(EVEN, backward=backward).values()) / 1e9, rel=1e-3)
    # between nodes, the one hop of each node that leaves it
    assert call_cost(EVEN, LV, with_(fast, gpus_per_node=4), backward=backward).seconds == pytest.approx(
        10 * lv.seconds, rel=0.15
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("keys", [(4096,) * 6, (300, 300, 200, 200, 0, 100)])
def test_bytes_are_those_of_the_formulas(keys: tuple[int, ...], backward: bool) -> None:
    problem = Problem(rows=10, keys=keys, heads=6, kv_heads=3, dim=8, batch=2, key_batch=2)
    cluster = with_(gpus_per_node=2)
    for way, formula in (
        (ParallelSpec("lv-xattn", (6, 1)), lv_xattn_bytes),
        (ParallelSpec("ring", (1, 6)), ring_bytes),
    ):
        found = call_cost(problem, way, cluster, backward=backward).timeline
        for rank in range(6):
            sent = found.node_bytes[rank % found.period] + found.network_bytes[rank % found.period]
            assert sent == sum(formula(replace(problem, rank=rank), backward=backward).values())
        # the ring leaves a node once, at its last rank
        assert [bool(sent) for sent in found.network_bytes[:2]] == [False, True]


def test_rows_that_go_straight_send_what_is_seen() -> None:
    seen = [[10, 4, 0], [10, 10, 3], [0, 2, 10]]
    problem = Problem(rows=10, keys=(100,) * 3, heads=2, kv_heads=1, dim=8)
    for backward in (False, True):
        found = call_cost(problem, ParallelSpec("lv-xattn", (3, 1)), ONE_NODE, backward=backward, seen=seen).timeline
        for rank in range(3):
            formula = lv_xattn_bytes(replace(problem, rank=rank), backward=backward, seen=seen)
            assert found.node_bytes[rank] == sum(formula.values())


def test_the_rank_with_most_keys_is_waited_for() -> None:
    uneven = replace(EVEN, keys=(4096, 8192, 0, 4096, 4096, 4096, 4096, 4096))
    slow = with_(ONE_NODE, attention_forward=1e8)
    cost = call_cost(uneven, LV, slow, backward=False)
    block = 4 * 64 * 8192 * 8 * 64 / 1e8
    assert cost.attention == pytest.approx(8 * block)  # LV-XAttn: one rank computes all rows against its keys
    assert cost.seconds >= 8 * block * 0.999
    # in the ring every rank computes all blocks; the long one passes through, and holds each up once
    ring = call_cost(uneven, RING, slow, backward=False)
    assert ring.attention == pytest.approx(flops(uneven, False) / 1e8)
    assert ring.attention < ring.seconds <= ring.attention + block


def test_shares_of_blocks_count() -> None:
    slow = with_(ONE_NODE, attention_forward=1e8)
    whole = call_cost(EVEN, LV, slow, backward=False).seconds
    assert call_cost(EVEN, LV, slow, backward=False, visible=0.5).seconds == pytest.approx(whole / 2, rel=1e-6)
    own = [[1.0 if i == j else 0.0 for j in range(8)] for i in range(8)]
    alone = call_cost(EVEN, RING, slow, backward=False, visible=own)
    assert alone.attention == pytest.approx(whole / 8)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 12, 16, 24])
def test_the_ranks_simulated_stand_for_all(ranks: int) -> None:
    """Even shares are simulated by a period; the same with all ranks (a matrix of ones asks for it) agrees."""
    problem = Problem(rows=32, keys=(256,) * ranks, heads=12, kv_heads=3, dim=16)
    ones = [[1.0] * ranks for _ in range(ranks)]
    cluster = with_(attention_forward=4e9, attention_backward=4e9, node_latency_s=1e-5, network_latency_s=1e-4)
    for way in ways(problem):
        for backward in (False, True):
            short = call_cost(problem, way, cluster, backward=backward)
            full = call_cost(problem, way, cluster, backward=backward, visible=ones)
            assert short.timeline.period == period_of(way, ranks, cluster)
            assert full.timeline.period == ranks
            assert short.seconds == pytest.approx(full.seconds, rel=1e-9), (str(way), backward)
            assert short.timeline.all_network_bytes == full.timeline.all_network_bytes, str(way)
    assert period_of(ParallelSpec("lv-xattn", (ranks, 1)), ranks, cluster) == (
        1 if ranks <= 4 else 4 if ranks % 4 == 0 else ranks
    )


def test_ulysses_sends_heads_and_repeats_keys_only_as_far_as_needed() -> None:
    cluster = with_(ONE_NODE, attention_forward=1e18, attention_backward=1e18)
    for group in (8, 4, 2):
        problem = replace(EVEN, keys=EVEN.keys[:group])
        for backward in (False, True):
            cost = call_cost(problem, ParallelSpec("ulysses", (1, 1), group), cluster, backward=backward)
            assert cost.node_bytes == sum(ulysses_bytes(problem, backward=backward).values())
            assert cost.seconds == pytest.approx(cost.node_bytes / 1e9, rel=1e-3)
    again = call_cost(EVEN, ParallelSpec("ulysses", (1, 1), 8), cluster, backward=True, visual=Visual(dim=64))
    kv = 2 * 4096 * 8 * 64 * 2 * 7 // 8  # K and V are made again by rows, and dealt again
    assert again.node_bytes == sum(ulysses_bytes(EVEN, backward=True).values()) + kv


@pytest.mark.parametrize("tile", [(2, 4), (4, 2), (1, 4), (2, 2), (4, 1), (2, 1)])
@pytest.mark.parametrize("backward", [False, True])
def test_bytes_of_meshes_and_hybrids_are_those_of_the_formulas(tile: tuple[int, int], backward: bool) -> None:
    group = 8 // (tile[0] * tile[1])
    way = ParallelSpec("ulysses" if group > 1 else "mesh", tile, group)
    formula = ulysses_bytes if group > 1 else mesh_bytes
    found = call_cost(EVEN, way, ONE_NODE, backward=backward)
    assert found.node_bytes == sum(formula(EVEN, tile, backward=backward).values())
    assert found.network_bytes == 0


def test_replication_gathers_features_once_for_all_layers_and_projects_them_everywhere() -> None:
    visual = Visual(dim=512, layers=4)
    cost = call_cost(EVEN, ParallelSpec("replicate", (8, 1)), ONE_NODE, backward=False, visual=visual)
    once = 4 * 4096 * 512 * 2 * 64 / 1e12
    assert cost.projection == pytest.approx(8 * once)
    assert cost.attention == pytest.approx(flops(EVEN, False) / 1e12)
    assert cost.exposed == pytest.approx(7 * 4096 * 512 * 2 / 1e9 / 4)
    lv = call_cost(EVEN, LV, ONE_NODE, backward=True, visual=visual)
    assert lv.projection == pytest.approx(3 * once)  # again, dW, dy
    frozen = replace(visual, trained=False, recompute=False)
    assert call_cost(EVEN, LV, ONE_NODE, backward=True, visual=frozen).projection == pytest.approx(once)
    assert call_cost(EVEN, ParallelSpec("replicate", (8, 1)), ONE_NODE, backward=True, visual=frozen).exposed == 0


def test_blocks_that_hide_a_transfer() -> None:
    """16 ranks in nodes of 4, tile 4 x 4: rows stay inside the node, all four columns' hops share its one link."""
    problem = Problem(rows=100, keys=(1000,) * 16, heads=4, kv_heads=4, dim=100)
    cluster = with_(attention_forward=4 * 100 * 1000 * 4 * 100 / 1e-3)  # 1 ms a block
    found = overlap_ratios_by_rates(problem, (4, 4), cluster, backward=False)
    assert found.q == pytest.approx(100 * 4 * 100 * 2 / 1e9 / 1e-3, rel=0.05)
    assert found.o == pytest.approx(100 * 4 * 104 * 4 / 1e9 / 1e-3, rel=0.1)
    assert found.kv == pytest.approx(2 * 1000 * 4 * 100 * 2 / (1e8 / 4) / 1e-3, rel=0.05)
    assert not found.one_link  # rows inside nodes, columns between them
    assert overlap_ratios_by_rates(problem, (16, 1), cluster, backward=False).q == pytest.approx(
        0.8, rel=0.05
    )  # over the net
