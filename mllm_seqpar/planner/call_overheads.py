"""What a call costs besides its schedule: heads dealt by all-to-all, features gathered, K and V projected from them."""

from __future__ import annotations

from dataclasses import dataclass

from mllm_seqpar.schedules.bytes_sent import LSE_BYTES, Problem
from mllm_seqpar.schedules.head_sharding import HeadShards

from .candidates import ParallelSpec
from .cluster import Cluster
from .transfers import all_gather, all_to_all


@dataclass(frozen=True, kw_only=True)
class Visual:
    """Where the keys of a cross-attention come from.

    Attributes:
        dim: channels of the visual features y that K and V are projected from.
        layers: cross-attention layers of the model; what is done once for all of them is shared out.
        recompute: backward projects K and V again instead of keeping them.
        trained: the features need a gradient (vision tower or projector are trained).
    """

    dim: int
    layers: int = 1
    recompute: bool = True
    trained: bool = True


@dataclass(frozen=True)
class CallOverheads:
    """What happens before and after the schedule, hidden by nothing."""

    seconds: float = 0.0
    node_bytes: int = 0
    network_bytes: int = 0


def call_overheads(
    problem: Problem, way: ParallelSpec, cluster: Cluster, backward: bool, visual: Visual | None
) -> CallOverheads:
    """What a call sends before and after its schedule: all-to-all of heads, or features gathered."""
    if way.strategy == "replicate" and problem.ranks > 1:
        return _replication(problem, cluster, backward, visual)
    if way.heads_over == 1:
        return CallOverheads()
    shares = HeadShards(problem.heads, problem.kv_heads, way.heads_over)
    kv_heads = sum(len(shares.kv_heads_of(place)) for place in range(way.heads_over))
    q = problem.batch * problem.rows * problem.heads * problem.dim * problem.element
    kv = 2 * problem.key_batch * max(problem.keys) * kv_heads * problem.dim * problem.element
    if backward:  # dO to heads, and K and V where they are made again; dQ, dK, dV back to rows and keys
        partial = kv_heads > problem.kv_heads  # ranks that share a key head have a part of its gradient each
        kv_gradients = kv // problem.element * problem.accumulated if partial else kv
        sizes = (q + (kv if visual is not None and visual.recompute else 0), q + kv_gradients)
    else:  # Q, K, V to heads; O and the log-sum-exp back to rows
        sizes = (q + kv, q + problem.batch * problem.rows * problem.heads * LSE_BYTES)
    trips = [all_to_all(cluster, problem.ranks, way.heads_over, size) for size in sizes]
    return CallOverheads(*(sum(part) for part in zip(*trips, strict=True)))


def _replication(problem: Problem, cluster: Cluster, backward: bool, visual: Visual | None) -> CallOverheads:
    """Features gathered once per step (forward) and their gradients summed (backward): each layer bears its share.

    Without features, keys and values themselves are gathered, by every layer.
    """
    if visual is None:
        size = 2 * problem.key_batch * max(problem.keys) * problem.kv_heads * problem.dim
        layers = 1
    else:
        size, layers = problem.key_batch * max(problem.keys) * visual.dim, visual.layers
        if backward and not visual.trained:
            return CallOverheads()
    size *= problem.accumulated if backward else problem.element
    trip = all_gather(cluster, problem.ranks, size)
    return CallOverheads(trip.seconds / layers, trip.node_bytes // layers, trip.network_bytes // layers)


def projection_seconds(problem: Problem, cluster: Cluster, visual: Visual | None, backward: bool) -> float:
    """Projecting a rank's features to K and V; backward, the gradients of that, and K and V once more."""
    if visual is None:
        return 0.0
    once = 4 * problem.key_batch * max(problem.keys) * visual.dim * problem.kv_heads * problem.dim / cluster.matmul
    if not backward:
        return once
    gradients = 2 if visual.trained else 1  # of weights, and of features
    return once * (gradients + visual.recompute)
