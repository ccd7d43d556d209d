"""Layer: pure Python. Costs of calls against closed formulas, their bytes, and the strategy selected by them."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from clusters import FAST, all_bytes, with_

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import AttentionCall, Cluster, ParallelSpec, VisualProjection, select_strategy
from mllm_seqpar.planner.call_cost import candidate_specs, symmetry_period
from mllm_seqpar.planner.cluster import Cost
from mllm_seqpar.planner.simulation import RankTimeline
from mllm_seqpar.schedules.bytes_sent import (
    Problem,
    lv_xattn_bytes,
    mesh_axis_bytes,
    mesh_bytes,
    problem_between_groups,
    ring_bytes,
    ulysses_bytes,
)

EVEN = Problem(rows=64, keys=(4096,) * 8, heads=8, kv_heads=2, dim=64)
ONE_NODE = with_(gpus_per_node=8)
SLOW_KERNEL = with_(ONE_NODE, attention_forward=1e8, attention_backward=1e8)
FAST_KERNEL = with_(ONE_NODE, attention_forward=1e18, attention_backward=1e18)
LV, RING, REPLICATE = ParallelSpec("lv-xattn", (8, 1)), ParallelSpec("ring", (1, 8)), ParallelSpec("replicate", (8, 1))
PASSES = pytest.mark.parametrize("backward", [False, True])


def call_cost(*call: Any, **options: Any) -> Cost:
    return AttentionCall(*call, **options).cost


def call_timelines(*call: Any, **options: Any) -> Sequence[RankTimeline]:
    return AttentionCall(*call, **options).timelines()


def projection_seconds(spec: ParallelSpec, visual: VisualProjection, backward: bool) -> float:
    return AttentionCall(EVEN, spec, ONE_NODE, backward=backward, visual=visual).projection_seconds


def most(timelines: Sequence[RankTimeline], name: str) -> Any:
    """Return the largest value of a field of all ranks."""
    return max(getattr(rank, name) for rank in timelines)


def computing(*call: Any, **options: Any) -> float:
    """Return the seconds of attention of the rank that computes most."""
    timelines = call_timelines(*call, **options)
    return max(sum(end - start for kind, start, end in rank.spans if kind == "compute") for rank in timelines)


def flops(problem: Problem, backward: bool) -> float:
    return (10 if backward else 4) * problem.rows * sum(problem.keys) * problem.heads * problem.dim


@PASSES
@pytest.mark.parametrize("spec", [LV, RING, ParallelSpec("mesh", (2, 4))], ids=str)
def test_long_computation_hides_all_transfers(spec: ParallelSpec, backward: bool) -> None:
    cost = call_cost(EVEN, spec, SLOW_KERNEL, backward=backward)
    assert cost.seconds == pytest.approx(flops(EVEN, backward) / 1e8, rel=1e-6)
    assert computing(EVEN, spec, SLOW_KERNEL, backward=backward) == pytest.approx(cost.seconds)
    assert cost.exposed == pytest.approx(0, abs=1e-6)
    assert cost.hidden > 0


@PASSES
def test_short_computation_exposes_all_bytes(backward: bool) -> None:
    lv, ring = (call_cost(EVEN, spec, FAST_KERNEL, backward=backward) for spec in (LV, RING))
    assert lv.seconds == pytest.approx(sum(lv_xattn_bytes(EVEN, backward=backward).values()) / 1e9, rel=1e-3)
    assert ring.seconds == pytest.approx(sum(ring_bytes(EVEN, backward=backward).values()) / 1e9, rel=1e-3)
    # on two nodes, the hops between them are ten times slower
    two_nodes = call_cost(EVEN, LV, with_(FAST_KERNEL, gpus_per_node=4), backward=backward)
    assert two_nodes.seconds == pytest.approx(10 * lv.seconds, rel=0.15)


SIX = Problem(rows=10, keys=(4096,) * 6, heads=6, kv_heads=3, dim=8, batch=2, key_batch=2)
UNEVEN = replace(SIX, keys=(300, 300, 200, 200, 0, 100))
ROUNDED = replace(EVEN, direct_element=2, kv_heads=1)
PRUNED = Problem(rows=10, keys=(100,) * 3, heads=2, kv_heads=1, dim=8)
SEEN = [[10, 4, 0], [10, 10, 3], [0, 2, 10]]
DIRECT = ParallelSpec("lv-xattn", (8, 1), all_pairs=True)
MESHES = [((2, 4), mesh_bytes), ((4, 1), ulysses_bytes), ((2, 2), ulysses_bytes), ((1, 2), ulysses_bytes)]
MESHES.append(((1, 1), ulysses_bytes))
BYTES = {
    "lv-xattn": (SIX, ParallelSpec("lv-xattn", (6, 1)), lv_xattn_bytes),
    "lv-xattn, uneven": (UNEVEN, ParallelSpec("lv-xattn", (6, 1)), lv_xattn_bytes),
    "ring": (SIX, ParallelSpec("ring", (1, 6)), ring_bytes),
    "ring, uneven": (UNEVEN, ParallelSpec("ring", (1, 6)), ring_bytes),
    "pruned": (PRUNED, ParallelSpec("lv-xattn", (3, 1)), functools.partial(lv_xattn_bytes, visible_rows=SEEN)),
    "all pairs": (EVEN, DIRECT, functools.partial(lv_xattn_bytes, direct=True)),
    "all pairs, rounded": (replace(EVEN, direct_element=2), DIRECT, functools.partial(lv_xattn_bytes, direct=True)),
} | {
    f"{shape}, {case.direct_element}": (
        case,
        ParallelSpec("mesh" if formula is mesh_bytes else "ulysses", shape, 8 // (shape[0] * shape[1])),
        functools.partial(formula, mesh_shape=shape),
    )
    for case in (EVEN, ROUNDED)
    for shape, formula in MESHES
}


@PASSES
@pytest.mark.parametrize("case", BYTES)
def test_bytes_of_every_rank_match_the_formulas(case: str, backward: bool) -> None:
    problem, spec, formula = BYTES[case]
    rows = SEEN if problem is PRUNED else None
    found = call_cost(problem, spec, ONE_NODE, backward=backward, visible_rows=rows)
    timelines = call_timelines(problem, spec, ONE_NODE, backward=backward, visible_rows=rows)
    around = found.node_bytes - most(timelines, "node_bytes")  # collectives before and after the schedule
    for rank in range(problem.ranks):
        sent = timelines[rank % len(timelines)].node_bytes + around
        assert sent == sum(formula(replace(problem, rank=rank), backward=backward).values())
    assert found.network_bytes == 0


@PASSES
@pytest.mark.parametrize(("rows", "shape"), [(64, (2, 4)), (65536, (4, 2))], ids=["keys", "queries"])
@pytest.mark.parametrize("degree", [1, 2])
def test_mesh_keeps_the_axis_that_sends_more_inside_nodes(
    degree: int, rows: int, shape: tuple[int, int], backward: bool
) -> None:
    problem = replace(EVEN, rows=rows, keys=(4096,) * 8 * degree)
    spec = ParallelSpec("mesh" if degree == 1 else "ulysses", shape, degree)
    found = call_timelines(problem, spec, with_(gpus_per_node=4 * degree), backward=backward)
    q, kv = mesh_axis_bytes(problem_between_groups(problem, degree), shape, backward=backward)
    inside, between = (kv, q) if rows == 64 else (q, kv)
    assert most(found, "node_bytes") == inside > between == most(found, "network_bytes")


def test_ulysses_shards_recomputed_keys_and_values_again() -> None:
    spec = ParallelSpec("ulysses", (1, 1), 8)
    cost = call_cost(EVEN, spec, FAST_KERNEL, backward=True, visual=VisualProjection(dim=64))
    kv = 2 * 4096 * 8 * 64 * 2 * 7 // 8
    assert cost.node_bytes == sum(ulysses_bytes(EVEN, backward=True).values()) + kv


def test_rank_with_most_keys_determines_the_time() -> None:
    uneven = replace(EVEN, keys=(4096, 8192, 0, 4096, 4096, 4096, 4096, 4096))
    block = 4 * 64 * 8192 * 8 * 64 / 1e8
    lv, ring = (call_cost(uneven, spec, SLOW_KERNEL, backward=False) for spec in (LV, RING))
    lv_attention, attention = (computing(uneven, spec, SLOW_KERNEL, backward=False) for spec in (LV, RING))
    assert lv_attention == pytest.approx(8 * block)  # LV-XAttn: that rank computes all queries with its keys
    assert lv.seconds >= 8 * block * 0.999
    # in the ring every rank computes all blocks, and waits for the largest one once
    assert attention == pytest.approx(flops(uneven, False) / 1e8)
    assert attention < ring.seconds <= attention + block


def test_visible_fractions_scale_the_computation() -> None:
    full = call_cost(EVEN, LV, SLOW_KERNEL, backward=False).seconds
    half = call_cost(EVEN, LV, SLOW_KERNEL, backward=False, visible=0.5)
    assert half.seconds == pytest.approx(full / 2, rel=1e-6)
    diagonal = [[float(i == j) for j in range(8)] for i in range(8)]
    assert computing(EVEN, RING, SLOW_KERNEL, backward=False, visible=diagonal) == pytest.approx(full / 8)
    assert computing(EVEN, REPLICATE, SLOW_KERNEL, backward=False, visible=diagonal) == pytest.approx(full / 8)
    last = [[float(i == 7)] * 8 for i in range(8)]
    assert computing(EVEN, REPLICATE, SLOW_KERNEL, backward=False, visible=last) == pytest.approx(full)


@pytest.mark.parametrize("ranks", [1, 4, 6, 8, 12, pytest.param(24, marks=pytest.mark.slow)])
def test_one_period_of_ranks_represents_all(ranks: int) -> None:
    """A matrix of visible fractions, even of ones, makes the planner simulate every rank."""
    problem = Problem(rows=32, keys=(256,) * ranks, heads=12, kv_heads=3, dim=16)
    ones = [[1.0] * ranks for _ in range(ranks)]
    cluster = with_(attention_forward=4e9, attention_backward=4e9, node_latency_s=1e-5, network_latency_s=1e-4)
    for spec, backward in itertools.product(candidate_specs(problem), (False, True)):
        period, every = (
            call_timelines(problem, spec, cluster, backward=backward, visible=visible) for visible in (1.0, ones)
        )
        shapes = spec.mesh_shape, spec.mesh_shape[::-1]  # the second if KV groups come before Q groups
        periods = [symmetry_period(replace(spec, mesh_shape=shape), ranks, cluster) for shape in shapes]
        assert len(period) in periods and len(every) == ranks
        assert most(period, "seconds") == pytest.approx(most(every, "seconds"), rel=1e-9), (str(spec), backward)
        assert all_bytes(period, ranks) == all_bytes(every, ranks), str(spec)
    expected = 1 if ranks <= 4 else 4 if ranks % 4 == 0 else ranks
    assert symmetry_period(ParallelSpec("lv-xattn", (ranks, 1)), ranks, cluster) == expected


def test_projection_of_features_by_strategy_and_pass() -> None:
    """Replication gathers the features once, and every rank projects all; backward projects again if it must."""
    visual, shard = VisualProjection(dim=512, layers=4), 4 * 4096 * 512 * 2 * 64 / 1e12
    frozen = replace(visual, trained=False, recompute=False)
    assert projection_seconds(REPLICATE, visual, False) == pytest.approx(8 * shard)
    assert computing(EVEN, REPLICATE, ONE_NODE, backward=False) == pytest.approx(flops(EVEN, False) / 1e12)
    cost = call_cost(EVEN, REPLICATE, ONE_NODE, backward=False, visual=visual)
    assert cost.exposed == pytest.approx(7 * 4096 * 512 * 2 / 1e9 / 4)
    assert cost.seconds == pytest.approx(8 * shard + flops(EVEN, False) / 1e12 + cost.exposed)
    assert call_cost(EVEN, REPLICATE, ONE_NODE, backward=True, visual=frozen).exposed == 0
    # the gradients of trained weights and of the features, and the recomputed projection
    assert projection_seconds(LV, visual, True) == pytest.approx(3 * shard)
    assert projection_seconds(LV, frozen, True) == pytest.approx(shard)


@pytest.mark.parametrize(("rows", "q_rate", "kv_rate"), [(100, 1e8 / 4, 1e9), (5000, 1e9, 1e8 / 4)])
def test_overlap_ratios_are_transfer_times_over_block_times(rows: int, q_rate: float, kv_rate: float) -> None:
    """16 ranks on nodes of 4, mesh shape (4, 4): one axis is within a node, the other shares the network links."""
    problem = Problem(rows=rows, keys=(1000,) * 16, heads=4, kv_heads=4, dim=100)
    cluster = with_(attention_forward=4 * rows * 1000 * 4 * 100 / 1e-3)  # 1 ms per block
    found = AttentionCall(problem, ParallelSpec("mesh", (4, 4)), cluster, backward=False).overlap_ratios
    assert found.q == pytest.approx(rows * 4 * 100 * 2 / q_rate / 1e-3, rel=0.05)
    assert found.o == pytest.approx(rows * 4 * 104 * 4 / q_rate / 1e-3, rel=0.1)
    assert found.kv == pytest.approx(2 * 1000 * 4 * 100 * 2 / kv_rate / 1e-3, rel=0.05)
    assert not found.one_link
    slowest = AttentionCall(problem, ParallelSpec("mesh", (16, 1)), cluster, backward=False).overlap_ratios
    assert slowest.q == pytest.approx(rows * 4 * 100 * 2 / 1e8 / 1e-3, rel=0.05)


REAL = with_(FAST, network_link=1e10, node_latency_s=5e-6, block_overhead_s=1e-5)
RINGS = ("lv-xattn", "ring")


def problem(rows: int, keys: int, ranks: int = 8, heads: int = 28, kv_heads: int = 4) -> Problem:
    return Problem(rows=rows, keys=(keys,) * ranks, heads=heads, kv_heads=kv_heads, dim=128)


def test_the_shorter_of_queries_and_keys_is_moved() -> None:
    assert select_strategy(problem(64, 100_000), REAL, strategies=RINGS).spec.strategy == "lv-xattn"
    assert select_strategy(problem(4096, 512), REAL, strategies=RINGS).spec.strategy == "ring"


def test_mesh_is_selected_for_intermediate_ratios_of_queries_to_keys() -> None:
    cluster = with_(REAL, gpus_per_node=1, network_link=2e9)
    strategies = ("lv-xattn", "ring", "mesh")
    found = select_strategy(problem(2048, 4 * 2048, ranks=16), cluster, strategies=strategies)
    assert found.spec.strategy == "mesh" and 1 < found.spec.mesh_shape[0] < 16
    assert found.seconds < min(c.seconds for c in found.candidates if c.spec.strategy in ("lv-xattn", "ring"))


def test_ulysses_is_selected_for_high_latency_if_it_divides_the_heads() -> None:
    late = with_(REAL, gpus_per_node=8, node_latency_s=1e-3)
    strategies = ("lv-xattn", "ring", "mesh", "ulysses")
    found = select_strategy(problem(256, 256, heads=32), late, strategies=strategies)
    assert found.spec == ParallelSpec("ulysses", (1, 1), 8)
    found = select_strategy(problem(256, 256, heads=28), late, strategies=strategies)  # 8 does not divide 28
    assert all(candidate.spec.head_degree != 8 for candidate in found.candidates)


def test_lv_xattn_is_preferred_within_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_strategy(problem(64, 64, ranks=1), REAL).spec == ParallelSpec("lv-xattn", (1, 1))
    no_transfer_time = with_(REAL, node_link=1e15, network_link=1e15, network_latency_s=0.0)
    assert select_strategy(problem(2048, 2048), no_transfer_time).spec.strategy == "lv-xattn"
    close = problem(1024, 512)
    assert select_strategy(close, REAL, strategies=RINGS).spec.strategy == "ring"
    monkeypatch.setattr(import_module("mllm_seqpar.planner.call_cost"), "MARGIN", 30.0)
    assert select_strategy(close, REAL, strategies=RINGS).spec.strategy == "lv-xattn"


def test_candidates_are_the_legal_specs() -> None:
    found = list(candidate_specs(problem(8, 8, heads=12)))
    assert found[:2] == [ParallelSpec("lv-xattn", (8, 1)), ParallelSpec("ring", (1, 8))]
    assert {spec.mesh_shape for spec in found if spec.strategy == "mesh"} == {(2, 4), (4, 2)}
    hybrids = {(spec.head_degree, spec.mesh_shape) for spec in found if spec.strategy == "ulysses"}
    # 8 does not divide 12 heads
    assert hybrids == {(4, (1, 2)), (4, (2, 1)), (2, (1, 4)), (2, (2, 2)), (2, (4, 1))}
    only = select_strategy(problem(8, 8), REAL, mesh_shape=(2, 2))
    assert [c.spec for c in only.candidates] == [ParallelSpec("ulysses", (2, 2), 2)]
    with pytest.raises(ConfigError, match="cannot plan star; choose from lv-xattn, ring"):
        select_strategy(problem(8, 8), REAL, strategies=("lv-xattn", "star"))
    with pytest.raises(ConfigError, match="none of ulysses is legal for 7 heads on 8 ranks"):
        select_strategy(problem(8, 8, heads=7, kv_heads=1), REAL, strategies=("ulysses",))


def test_all_pairs_are_a_candidate_inside_a_node_with_symmetric_links() -> None:
    call = replace(problem(2048, 4096), direct_element=2)
    slow = with_(REAL, gpus_per_node=8, node_link=1e9)
    only: dict[str, Any] = {"strategies": ("lv-xattn",)}

    def all_pairs(cluster: Cluster, **options: Any) -> list[bool]:
        return [c.spec.all_pairs for c in select_strategy(call, cluster, **only, **options).candidates]

    assert all_pairs(with_(slow, all_pairs=True)) == [True, False], "they send fewer bytes, so they are faster"
    assert all_pairs(slow) == [False], "the links may not be symmetric"
    assert all_pairs(with_(slow, all_pairs=True, gpus_per_node=4)) == [False], "two nodes"
    assert all_pairs(with_(slow, all_pairs=True), visible_rows=[[1] * 8] * 8) == [False], "direct anyway"
    hidden = with_(slow, all_pairs=True, node_link=1e15)
    assert all_pairs(hidden) == [False], "not faster by more than the margin"
    assert "among all pairs" in select_strategy(call, with_(slow, all_pairs=True), **only).reason


def test_selection_gives_a_reason_and_all_candidates() -> None:
    long = problem(64, 100_000)
    found = select_strategy(long, REAL)
    assert found.reason.startswith("lv-xattn: ") and "64 rows, 800000 keys, 8 ranks" in found.reason
    seconds = [candidate.seconds for candidate in found.candidates]
    assert seconds == sorted(seconds) and len(seconds) == len(list(candidate_specs(long)))
    assert found == select_strategy(long, REAL)
