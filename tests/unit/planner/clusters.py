"""A cluster with round numbers, for times that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
"""Nodes of 4; 1 GB/s inside, 0.1 GB/s between; no fixed costs."""


def with_(cluster: Cluster = ROUND, **changes: Any) -> Cluster:
    return replace(cluster, **changes)
