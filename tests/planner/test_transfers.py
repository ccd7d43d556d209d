"""Layer: pure Python. Collectives by closed formulas, against counts by hand."""

from __future__ import annotations

import pytest
from clusters import ROUND, with_

from mllm_seqpar.planner.transfers import all_gather_seconds, all_to_all


def test_all_to_all_inside_a_node() -> None:
    """4 ranks of 400 MB: three parts of 100 MB leave each, at 1 GB/s."""
    seconds, inside, outside = all_to_all(ROUND, 8, 4, 400_000_000)
    assert (seconds, inside, outside) == (pytest.approx(0.3), 300_000_000, 0)


def test_all_to_all_over_nodes_is_as_slow_as_the_fullest_node_link() -> None:
    """8 ranks, 2 nodes of 4: each sends 4 parts of 100 MB across, 16 of a node together, at 0.1 GB/s."""
    seconds, inside, outside = all_to_all(ROUND, 8, 8, 800_000_000)
    assert (seconds, inside, outside) == (pytest.approx(16.0), 300_000_000, 400_000_000)
    cards = with_(network_link_per_gpu=1e7)  # a card of its own for each rank, slower than its share of the node's
    assert all_to_all(cards, 8, 8, 800_000_000).seconds == pytest.approx(40.0)
    late = with_(network_latency_s=1.0, step_overhead_s=0.5)
    assert all_to_all(late, 8, 8, 800_000_000).seconds == pytest.approx(17.5)


def test_groups_that_straddle_nodes_load_the_link_as_they_do() -> None:
    """Groups of 3 over nodes of 4, 12 ranks: node 0 holds group 0 and one rank of group 1, which sends two parts."""
    seconds, inside, outside = all_to_all(ROUND, 12, 3, 300_000_000)
    assert (inside, outside) == (200_000_000, 200_000_000)
    # node 1 holds 4, 5 (of group 1) and 6, 7 (of group 2): four parts of 100 MB leave it
    assert seconds == pytest.approx(4.0)


def test_nothing_to_exchange() -> None:
    assert all_to_all(ROUND, 8, 1, 100).seconds == 0
    assert all_gather_seconds(ROUND, 1, 1e9) == 0


def test_all_gather_takes_what_a_node_lacks_through_its_link_once() -> None:
    assert all_gather_seconds(ROUND, 4, 1e8) == pytest.approx(0.3)
    assert all_gather_seconds(ROUND, 8, 1e8) == pytest.approx(4.0)  # 4 shares of 0.1 GB at 0.1 GB/s
    assert all_gather_seconds(with_(gpus_per_node=1), 4, 1e8) == pytest.approx(3.0)
