"""Transfers that need no simulation, since all ranks do the same at once: closed formulas."""

from __future__ import annotations

from typing import NamedTuple

from .cluster import Cluster


class Trip(NamedTuple):
    """One collective: seconds, and bytes that a rank sends inside its node and to others."""

    seconds: float
    node_bytes: int
    network_bytes: int


def all_to_all(cluster: Cluster, ranks: int, group: int, size: int) -> Trip:
    """All-to-all over groups of `group` consecutive ranks, all groups at once, each rank holding `size` bytes.

    A rank keeps size / group and sends as much to each other; what leaves a node leaves through its one link.
    """
    if group == 1 or size == 0:
        return Trip(0.0, 0, 0)
    node = min(cluster.gpus_per_node, ranks)
    # groups that straddle nodes do so by different amounts; the fullest node link is what counts
    starts = range(0, ranks, group)
    most_outside = inside = 0
    leaving: dict[int, int] = {}
    for start in starts:
        members = range(start, min(start + group, ranks))
        for rank in members:
            near = sum(cluster.same_node(rank, other) for other in members) - 1
            far = len(members) - 1 - near
            inside, most_outside = max(inside, near), max(most_outside, far)
            leaving[rank // cluster.gpus_per_node] = leaving.get(rank // cluster.gpus_per_node, 0) + far
        if start >= 2 * node * group:  # what follows repeats
            break
    part = size / group
    near_seconds = inside * part / cluster.node_link + cluster.node_latency_s
    far_seconds = 0.0
    if most_outside:
        far_seconds = (
            max(most_outside * part / cluster.gpu_network_link, max(leaving.values()) * part / cluster.network_link)
            + cluster.network_latency_s
        )
    seconds = max(near_seconds, far_seconds) + cluster.step_overhead_s
    return Trip(seconds, int(inside * part), int(most_outside * part))


def all_gather_seconds(cluster: Cluster, ranks: int, size: float) -> float:
    """All ranks gather `size` bytes from each (or, the other way round, sum as much for each).

    At best each node takes what it lacks through its link once and passes it on inside.
    """
    if ranks == 1:
        return 0.0
    node = min(cluster.gpus_per_node, ranks)
    inside = (ranks - 1) * size / cluster.node_link + cluster.node_latency_s if node > 1 else 0.0
    outside = 0.0
    if ranks > node:
        outside = (ranks - node) * size / cluster.network_link + cluster.network_latency_s
    return max(inside, outside) + cluster.step_overhead_s


def all_gather(cluster: Cluster, ranks: int, size: int) -> Trip:
    """The same as a trip of `size` bytes from each rank to all others."""
    inside = min(ranks, cluster.gpus_per_node) - 1
    return Trip(all_gather_seconds(cluster, ranks, size), size * inside, size * (ranks - 1 - inside))


class Hop(NamedTuple):
    """One hop of a ring: bytes/s and seconds of latency of its slowest, and whether that is between nodes."""

    rate: float
    latency: float
    network: bool


def row_hop(cluster: Cluster, ranks: int, group: int, tile: tuple[int, int]) -> Hop:
    """The slowest hop of a row group: a ranks that lie `group` apart."""
    return _hop(cluster, ranks, distance=group, span=tile[0] * group)


def column_hop(cluster: Cluster, ranks: int, group: int, tile: tuple[int, int]) -> Hop:
    """The slowest hop of a column group: b ranks that lie a * `group` apart."""
    return _hop(cluster, ranks, distance=tile[0] * group, span=tile[0] * tile[1] * group)


def _hop(cluster: Cluster, ranks: int, *, distance: int, span: int) -> Hop:
    node = cluster.gpus_per_node
    if ranks <= node or (span <= node and node % span == 0):
        return Hop(cluster.node_link, cluster.node_latency_s, False)
    crossing = min(distance, node)  # ranks of one node whose next is on another
    rate = min(cluster.gpu_network_link, cluster.network_link / crossing)
    return Hop(rate, cluster.network_latency_s, True)
