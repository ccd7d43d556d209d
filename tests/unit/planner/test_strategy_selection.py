"""Layer: pure Python. The selected strategy on both sides of each crossover, and the legal candidates."""

from dataclasses import replace

import pytest
from clusters import FAST, with_

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import ParallelSpec, SelectionOptions, select_strategy
from mllm_seqpar.planner.candidates import candidate_specs
from mllm_seqpar.schedules.bytes_sent import Problem

REAL = with_(FAST, network_link=1e10, node_latency_s=5e-6, block_overhead_s=1e-5)
RINGS = SelectionOptions(strategies=("lv-xattn", "ring"))


def problem(rows: int, keys: int, ranks: int = 8, heads: int = 28, kv_heads: int = 4) -> Problem:
    return Problem(rows=rows, keys=(keys,) * ranks, heads=heads, kv_heads=kv_heads, dim=128)


def test_the_shorter_of_queries_and_keys_is_moved() -> None:
    assert select_strategy(problem(64, 100_000), REAL, options=RINGS).strategy == "lv-xattn"
    assert select_strategy(problem(4096, 512), REAL, options=RINGS).strategy == "ring"


def test_mesh_is_selected_for_intermediate_ratios_of_queries_to_keys() -> None:
    cluster = with_(REAL, gpus_per_node=1, network_link=2e9)
    options = SelectionOptions(strategies=("lv-xattn", "ring", "mesh"))
    found = select_strategy(problem(2048, 4 * 2048, ranks=16), cluster, options=options)
    assert found.strategy == "mesh" and 1 < found.mesh_shape[0] < 16
    assert found.seconds < min(c.seconds for c in found.candidates if c.spec.strategy in ("lv-xattn", "ring"))


def test_ulysses_is_selected_for_high_latency_if_it_divides_the_heads() -> None:
    late = with_(REAL, gpus_per_node=8, node_latency_s=1e-3)
    options = SelectionOptions(strategies=("lv-xattn", "ring", "mesh", "ulysses"))
    found = select_strategy(problem(256, 256, heads=32), late, options=options)
    assert found.spec == ParallelSpec("ulysses", (1, 1), 8)
    found = select_strategy(problem(256, 256, heads=28), late, options=options)  # 8 does not divide 28
    assert all(candidate.spec.head_degree != 8 for candidate in found.candidates)


def test_lv_xattn_is_preferred_within_the_margin() -> None:
    assert select_strategy(problem(64, 64, ranks=1), REAL).spec == ParallelSpec("lv-xattn", (1, 1))
    no_transfer_time = with_(REAL, node_link=1e15, network_link=1e15, network_latency_s=0.0)
    assert select_strategy(problem(2048, 2048), no_transfer_time).strategy == "lv-xattn"
    close = problem(1024, 512)
    assert select_strategy(close, REAL, options=RINGS).strategy == "ring"
    assert select_strategy(close, REAL, options=replace(RINGS, margin=30.0)).strategy == "lv-xattn"


def test_candidates_are_the_legal_specs() -> None:
    found = list(candidate_specs(problem(8, 8, heads=12)))
    assert found[:2] == [ParallelSpec("lv-xattn", (8, 1)), ParallelSpec("ring", (1, 8))]
    assert {spec.mesh_shape for spec in found if spec.strategy == "mesh"} == {(2, 4), (4, 2)}
    hybrids = {(spec.head_degree, spec.mesh_shape) for spec in found if spec.strategy == "ulysses"}
    # 8 does not divide 12 heads
    assert hybrids == {(4, (1, 2)), (4, (2, 1)), (2, (1, 4)), (2, (2, 2)), (2, (4, 1))}
    only = select_strategy(problem(8, 8), REAL, options=SelectionOptions(mesh_shape=(2, 2)))
    assert [c.spec for c in only.candidates] == [ParallelSpec("ulysses", (2, 2), 2)]
    with pytest.raises(ConfigError, match="cannot plan star; choose from lv-xattn, ring"):
        select_strategy(problem(8, 8), REAL, options=SelectionOptions(strategies=("lv-xattn", "star")))
    with pytest.raises(ConfigError, match="none of ulysses is legal for 7 heads on 8 ranks"):
        select_strategy(problem(8, 8, heads=7, kv_heads=1), REAL, options=SelectionOptions(strategies=("ulysses",)))


def test_selection_gives_a_reason_and_all_candidates() -> None:
    long = problem(64, 100_000)
    found = select_strategy(long, REAL)
    assert found.reason.startswith("lv-xattn: ") and "64 rows, 800000 keys, 8 ranks" in found.reason
    seconds = [candidate.seconds for candidate in found.candidates]
    assert seconds == sorted(seconds) and len(seconds) == len(list(candidate_specs(long)))
    assert found == select_strategy(long, REAL)
