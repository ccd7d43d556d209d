"""Layer: one process, loopback ranks. Measured figures are plausible and the same on all ranks."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from mllm_seqpar.comm import as_communicator, run_loopback
from mllm_seqpar.planner import Cluster
from mllm_seqpar.planner.calibrate import AttentionShape, calibrate

SHAPE = AttentionShape(heads=2, kv_heads=2, dim=16)


def check(clusters: list[Cluster]) -> Cluster:
    """Return the cluster that all ranks have measured."""
    cluster = clusters[0]
    assert all(other == cluster for other in clusters)
    for rate in (cluster.attention_forward, cluster.attention_backward, cluster.matmul):
        assert 1e6 < rate < 1e15
    assert cluster.node_link > 1e5 and cluster.node_latency_s >= 0
    assert cluster.step_overhead_s > 0 and cluster.block_overhead_s > 0
    return cluster


def test_ranks_of_one_node_measure_its_links() -> None:
    cluster = check(run_loopback(2, lambda comm: calibrate(comm, shape=SHAPE)))
    assert cluster.gpus_per_node == 2 and cluster.links == "node"
    assert cluster.network_link == cluster.node_link and cluster.network_link_per_gpu is None


def test_ranks_of_two_nodes_measure_both_kinds_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 threads, loopback-0 to loopback-3, on two host names."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"host {int(threading.current_thread().name[-1]) // 2}")
    cluster = check(run_loopback(4, lambda comm: calibrate(comm, shape=SHAPE)))
    assert cluster.gpus_per_node == 2 and cluster.links == "all"
    assert cluster.network_link_per_gpu is not None
    assert 0 < cluster.network_link_per_gpu <= cluster.network_link


def test_one_rank_measures_no_links() -> None:
    cluster = calibrate(as_communicator(None), shape=AttentionShape(dtype=torch.bfloat16), name="alone")
    assert cluster.name == "alone" and cluster.gpus_per_node == 1 and "bfloat16" in cluster.source
    assert cluster.links == "none" and cluster.node_latency_s == cluster.step_overhead_s == 0
