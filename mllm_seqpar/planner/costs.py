"""The cost of an operation, and the formulas of collectives: all ranks do the same at once, so nothing is simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

from .cluster import Cluster


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank, including transfers, and the largest number of bytes that any rank sends.

    Attributes:
        exposed: seconds in which a rank waits for transfers or for other ranks.
        hidden: seconds of transfers that run under computation.
        node_bytes, network_bytes: bytes sent inside the node and to other nodes.
    """

    seconds: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    node_bytes: int = 0
    network_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(x + y for x, y in zip(_figures(self), _figures(other), strict=True)))

    def __mul__(self, count: int) -> Cost:
        return Cost(*(x * count for x in _figures(self)))


_figures = attrgetter("seconds", "exposed", "hidden", "node_bytes", "network_bytes")


@dataclass(frozen=True)
class Passes:
    """The costs of the forward and of the backward pass; the same figures as `Cost` are those of both together."""

    forward: Cost = Cost()
    backward: Cost = Cost()

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, count: int) -> Passes:
        return Passes(self.forward * count, self.backward * count)

    @property
    def both(self) -> Cost:
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        return self.both.seconds

    @property
    def exposed(self) -> float:
        return self.both.exposed


def all_to_all(cluster: Cluster, ranks: int, group: int, size: int) -> Cost:
    """Return the cost of all-to-all in all groups of `group` consecutive ranks at once, with `size` bytes per rank.

    The ranks of a node share the node's network link.
    """
    if group == 1 or size == 0:
        return Cost()
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
    return _waiting(seconds + cluster.step_overhead_s, int(peers_inside * part), int(peers_outside * part))


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


def all_gather(cluster: Cluster, ranks: int, size: int) -> Cost:
    """Return the cost of an all-gather in which each rank sends its `size` bytes to every other rank."""
    inside = min(ranks, cluster.gpus_per_node) - 1
    return _waiting(all_gather_seconds(cluster, ranks, size), size * inside, size * (ranks - 1 - inside))


def _waiting(seconds: float, node_bytes: int, network_bytes: int) -> Cost:
    """Return the cost of transfers that nothing hides."""
    return Cost(seconds, seconds, 0.0, node_bytes, network_bytes)
