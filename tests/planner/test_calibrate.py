"""Layer: gloo ranks. Measuring this machine: plausible figures, the same on all ranks, quickly."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from mllm_seqpar.comm import as_communicator, run_loopback
from mllm_seqpar.planner import Cluster
from mllm_seqpar.planner.calibrate import Shape, calibrate
from ranks import ranks


def measured(rank: int, world: int) -> Cluster:
    return calibrate(as_communicator(None), shape=Shape(heads=4, kv_heads=2, dim=32))


def test_ranks_agree_on_plausible_figures() -> None:
    found = ranks(2).run(measured)
    cluster, other = found
    assert cluster == other
    assert cluster.gpus_per_node == 2
    for rate in (cluster.attention_forward, cluster.attention_backward, cluster.matmul):
        assert 1e7 < rate < 1e14
    assert 1e6 < cluster.node_link < 1e12 and cluster.network_link == cluster.node_link
    assert 0 <= cluster.node_latency_s < 1 and 0 < cluster.step_overhead_s < 1 and 0 < cluster.block_overhead_s < 1


def test_ranks_of_two_nodes_measure_both_kinds_of_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ranks as threads, loopback-0 to loopback-3, which take themselves for two hosts."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"host {int(threading.current_thread().name[-1]) // 2}")
    found = run_loopback(4, lambda comm: calibrate(comm, shape=Shape(heads=2, kv_heads=2, dim=16)))
    assert all(cluster == found[0] for cluster in found) and found[0].gpus_per_node == 2
    assert found[0].network_link_per_gpu is not None
    assert 0 < found[0].network_link_per_gpu <= found[0].network_link


def test_one_rank_has_nothing_to_wait_for() -> None:
    found = calibrate(as_communicator(None), shape=Shape(dtype=torch.bfloat16), name="alone")
    assert found.name == "alone" and found.gpus_per_node == 1 and "bfloat16" in found.source
    assert found.node_latency_s == found.step_overhead_s == 0
