"""Layer: pure Python. Costs of collectives against results worked out by hand."""

from __future__ import annotations

import pytest
from clusters import ROUND, with_

from mllm_seqpar.planner.collectives import all_gather_seconds, all_to_all


def test_all_to_all_within_a_node() -> None:
    """4 ranks with 400 MB each send three parts of 100 MB at 1 GB/s."""
    assert all_to_all(ROUND, 8, 4, 400_000_000) == (pytest.approx(0.3), 300_000_000, 0)
    assert all_to_all(ROUND, 8, 1, 100).seconds == 0


def test_all_to_all_between_nodes_is_bound_by_the_fullest_node_link() -> None:
    """8 ranks on 2 nodes of 4: each sends 4 parts of 100 MB to the other node, 16 per node link of 0.1 GB/s."""
    seconds, inside, outside = all_to_all(ROUND, 8, 8, 800_000_000)
    assert (seconds, inside, outside) == (pytest.approx(16.0), 300_000_000, 400_000_000)
    cards = with_(network_link_per_gpu=1e7)  # one network card per rank, slower than its part of the node's link
    assert all_to_all(cards, 8, 8, 800_000_000).seconds == pytest.approx(40.0)
    late = with_(network_latency_s=1.0, step_overhead_s=0.5)
    assert all_to_all(late, 8, 8, 800_000_000).seconds == pytest.approx(17.5)


def test_groups_that_straddle_nodes_load_links_unevenly() -> None:
    """Groups of 3 on nodes of 4: node 1 holds ranks 4, 5 of group 1 and 6, 7 of group 2; four parts leave it."""
    seconds, inside, outside = all_to_all(ROUND, 12, 3, 300_000_000)
    assert (seconds, inside, outside) == (pytest.approx(4.0), 200_000_000, 200_000_000)


def test_all_gather_receives_each_shard_once_per_node() -> None:
    assert all_gather_seconds(ROUND, 1, 1e9) == 0
    assert all_gather_seconds(ROUND, 4, 1e8) == pytest.approx(0.3)
    assert all_gather_seconds(ROUND, 8, 1e8) == pytest.approx(4.0)  # 4 shards of 0.1 GB at 0.1 GB/s
    assert all_gather_seconds(with_(gpus_per_node=1), 4, 1e8) == pytest.approx(3.0)
