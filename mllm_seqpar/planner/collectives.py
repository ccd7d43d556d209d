"""Costs of collectives by closed formulas. All ranks do the same at once, so no simulation is needed."""

from collections import Counter
from typing import NamedTuple

from .cluster import Cluster


class CollectiveCost(NamedTuple):
    """Seconds of a collective, and the bytes that one rank sends inside its node and to other nodes."""

    seconds: float = 0.0
    node_bytes: int = 0
    network_bytes: int = 0


def all_to_all(cluster: Cluster, ranks: int, group: int, size: int) -> CollectiveCost:
    """Return the cost of all-to-all in all groups of `group` consecutive ranks at once, with `size` bytes per rank.

    The ranks of a node share the node's network link.
    """
    if group == 1 or size == 0:
        return CollectiveCost()
    # Groups may straddle nodes by different amounts. The slowest rank and the fullest node link determine the time.
    node = min(cluster.gpus_per_node, ranks)
    peers_inside = peers_outside = 0
    leaving_node: Counter[int] = Counter()
    for start in range(0, ranks, group):
        members = range(start, min(start + group, ranks))
        for rank in members:
            inside = sum(cluster.same_node(rank, other) for other in members) - 1
            outside = len(members) - 1 - inside
            peers_inside, peers_outside = max(peers_inside, inside), max(peers_outside, outside)
            leaving_node[rank // cluster.gpus_per_node] += outside
        if start >= 2 * node * group:  # the pattern repeats
            break
    part = size / group
    seconds = peers_inside * part / cluster.node_link + cluster.node_latency_s
    if peers_outside:
        by_gpu = peers_outside * part / cluster.gpu_network_link
        by_node = max(leaving_node.values()) * part / cluster.network_link
        seconds = max(seconds, max(by_gpu, by_node) + cluster.network_latency_s)
    return CollectiveCost(seconds + cluster.step_overhead_s, int(peers_inside * part), int(peers_outside * part))


def all_gather_seconds(cluster: Cluster, ranks: int, size: float) -> float:
    """Return the seconds of an all-gather of `size` bytes from each rank, or of a reduce-scatter of the same size.

    This is a lower bound: each node receives the data that it lacks through its network link once.
    """
    if ranks == 1:
        return 0.0
    node = min(cluster.gpus_per_node, ranks)
    inside = (ranks - 1) * size / cluster.node_link + cluster.node_latency_s if node > 1 else 0.0
    outside = (ranks - node) * size / cluster.network_link + cluster.network_latency_s if ranks > node else 0.0
    return max(inside, outside) + cluster.step_overhead_s


def all_gather(cluster: Cluster, ranks: int, size: int) -> CollectiveCost:
    """Return the cost of an all-gather in which each rank sends its `size` bytes to every other rank."""
    inside = min(ranks, cluster.gpus_per_node) - 1
    return CollectiveCost(all_gather_seconds(cluster, ranks, size), size * inside, size * (ranks - 1 - inside))
