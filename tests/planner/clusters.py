"""Clusters for the planner's tests: round numbers, so that times can be worked out by hand."""

from dataclasses import replace

from mllm_seqpar.planner import Cluster

ROUND = Cluster(
    name="round",
    gpus_per_node=4,
    attention_forward=1e12,
    attention_backward=1e12,
    matmul=1e12,
    memory_bytes=80e9,
    node_link=1e9,
    node_latency_s=0.0,
    network_link=1e8,
    network_latency_s=0.0,
)
"""Nodes of 4; 1 GB/s inside, 0.1 GB/s between; nothing has a fixed cost."""


def with_(cluster: Cluster = ROUND, **changes: object) -> Cluster:
    return replace(cluster, **changes)  # type: ignore[arg-type]
