"""A cluster with round numbers, for times that can be worked out by hand, one with realistic numbers, and sums."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mllm_seqpar.planner import Cluster
from mllm_seqpar.planner.simulation import RankTimeline

RATES = {"attention_forward": 1e12, "attention_backward": 1e12, "matmul": 1e12, "memory_bytes": 80e9}
LINKS = {"node_link": 1e9, "node_latency_s": 0.0, "network_link": 1e8, "network_latency_s": 0.0}
ROUND = Cluster(name="round", gpus_per_node=4, **RATES, **LINKS)
"""Nodes of 4; 1 GB/s inside, 0.1 GB/s between; no fixed costs."""


def with_(cluster: Cluster = ROUND, **changes: Any) -> Cluster:
    return replace(cluster, **changes)


FAST = with_(attention_forward=1e14, attention_backward=1e14, matmul=2e14, node_link=2e11, network_latency_s=2e-5)


def all_bytes(timelines: Sequence[RankTimeline], ranks: int) -> tuple[int, int]:
    """Return the bytes that all ranks send inside nodes and to other nodes."""
    copies = ranks // len(timelines)
    sent = ((rank.node_bytes, rank.network_bytes) for rank in timelines)
    node, network = (copies * sum(column) for column in zip(*sent, strict=True))
    return node, network
