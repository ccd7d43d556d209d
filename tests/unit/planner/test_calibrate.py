"""Layer: one process, loopback ranks. Measured figures are plausible and the same on all ranks."""

import socket
import threading

import pytest
import torch

from mllm_seqpar.comm import as_communicator, run_loopback
from mllm_seqpar.planner.calibrate import AttentionShape, calibrate

SHAPE = AttentionShape(heads=2, kv_heads=2, dim=16)


@pytest.mark.parametrize(("ranks", "links"), [(2, "node"), (4, "all")])
def test_ranks_of_one_or_two_nodes_agree_on_what_they_measured(
    ranks: int, links: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads loopback-0 to loopback-3, two on each host name."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"host {int(threading.current_thread().name[-1]) // 2}")
    cluster, *others = run_loopback(ranks, lambda comm: calibrate(comm, shape=SHAPE))
    assert all(other == cluster for other in others)
    assert all(1e6 < rate < 1e15 for rate in (cluster.attention_forward, cluster.attention_backward, cluster.matmul))
    assert cluster.node_link > 1e5 and cluster.node_latency_s >= 0
    assert cluster.step_overhead_s > 0 and cluster.block_overhead_s > 0
    assert (cluster.gpus_per_node, cluster.links) == (2, links)
    if links == "node":
        assert cluster.network_link == cluster.node_link and cluster.network_link_per_gpu is None
    else:
        assert 0 < cluster.network_link_per_gpu <= cluster.network_link


def test_one_rank_measures_no_links() -> None:
    cluster = calibrate(as_communicator(None), shape=AttentionShape(dtype=torch.bfloat16), name="alone")
    assert cluster.name == "alone" and cluster.gpus_per_node == 1 and "bfloat16" in cluster.source
    assert cluster.links == "none" and cluster.node_latency_s == cluster.step_overhead_s == 0
