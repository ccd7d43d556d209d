"""One attention call: the specs that can compute it, their costs, and the selection of the fastest.

The schedule of a spec is simulated with the FLOPs and bytes of closed formulas. Attention counts 4 FLOPs forward and 10
backward (scores are recomputed) per query, visible key, head and channel. Projecting K and V from visual features costs
4 d_vis G D FLOPs per key; backward costs twice that for the gradients, and once more where K and V are recomputed.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.runtime.strategy_selector import VisualProjection
from mllm_seqpar.schedules import AttentionBlock, Axis, OverlapRatios, Transfer, TransferKind, schedule_for
from mllm_seqpar.schedules.bytes_sent import LSE_BYTES, Problem, mesh_axis_bytes, problem_between_groups
from mllm_seqpar.schedules.head_sharding import HeadShards
from mllm_seqpar.schedules.mesh import mesh_ranks
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES

from .cluster import Cluster, Cost, Passes, all_gather, all_to_all
from .simulation import Phase, RankTimeline, simulate

MARGIN = 0.02
"""Relative differences in predicted time below this value are ignored."""

VisibleFraction = float | Sequence[Sequence[float]]
"""Fraction of visible entries: one number for all blocks, or [i][j] for block (i, j)."""


@dataclass(frozen=True)
class ParallelSpec:
    """The strategy, mesh shape and head-sharding degree of one attention call.

    Attributes:
        strategy: one of STRATEGIES.
        mesh_shape: (a, b), Q shards by KV shards; of the ranks, or of the groups of `head_degree` ranks.
        head_degree: the number of consecutive ranks that shard the heads by all-to-all (Ulysses); 1 for none.
        all_pairs: whether LV-XAttn sends Q shards point to point, from their owner to each rank and back.
    """

    strategy: str
    mesh_shape: tuple[int, int]
    head_degree: int = 1
    all_pairs: bool = False

    def __str__(self) -> str:
        a, b = self.mesh_shape
        if self.strategy == "mesh":
            return f"mesh {a}x{b}"
        if self.strategy == "ulysses" and self.mesh_shape != (1, 1):
            return f"ulysses {self.head_degree} x tile {a}x{b}"
        return f"{self.strategy} among all pairs" if self.all_pairs else self.strategy


def candidate_specs(
    problem: Problem, strategies: Sequence[str] = STRATEGIES, *, all_pairs: bool = False
) -> Iterator[ParallelSpec]:
    """Yield all legal specs of `strategies` in the order of STRATEGIES; raise ConfigError for an unknown strategy.

    `all_pairs` includes LV-XAttn among all pairs of ranks. With 2 ranks it is the ring.
    """
    unknown = sorted(set(strategies) - set(STRATEGIES))
    if unknown:
        raise ConfigError(f"strategies: cannot plan {', '.join(unknown)}; choose from {', '.join(STRATEGIES)}")
    n = problem.ranks
    degrees = [degree for degree in reversed(_divisors(n)) if degree > 1 and problem.heads % degree == 0]
    specs = (
        ParallelSpec("lv-xattn", (n, 1)),
        *([ParallelSpec("lv-xattn", (n, 1), all_pairs=True)] if all_pairs and n > 2 else []),
        ParallelSpec("ring", (1, n)),
        *(ParallelSpec("mesh", (a, n // a)) for a in _divisors(n)[1:-1]),
        *(ParallelSpec("ulysses", (a, n // d // a), d) for d in degrees for a in _divisors(n // d)),
        ParallelSpec("replicate", (n, 1)),
    )
    yield from (spec for spec in specs if spec.strategy in strategies)


def _divisors(n: int) -> list[int]:
    return [a for a in range(1, n + 1) if n % a == 0]


def symmetry_period(spec: ParallelSpec, ranks: int, cluster: Cluster) -> int:
    """Return how many ranks represent all ranks if the shards are even: the smallest shift that preserves the schedule.

    It moves by whole Q groups, or within every Q group, and maps nodes to nodes.
    """
    a, degree, node = spec.mesh_shape[0], spec.head_degree, cluster.gpus_per_node
    one_node = ranks <= node
    for period in _divisors(ranks):
        if period % degree or (not one_node and period % node):
            continue
        shift = period // degree
        if shift % a == 0 or (a % shift == 0 and (one_node or a * degree % node == 0)):
            return period
    return ranks


def call_cost(
    problem: Problem,
    spec: ParallelSpec,
    cluster: Cluster,
    *,
    backward: bool,
    visual: VisualProjection | None = None,
    **call: Any,
) -> Cost:
    """Return the cost of one direction of one attention call, with the projection of K and V and its gradients.

    `call` are further arguments of `call_timelines`.
    """
    timelines = call_timelines(problem, spec, cluster, backward=backward, **call)
    seconds = projection_seconds(problem, spec, cluster, visual, backward=backward)
    names = ("seconds", "exposed", "hidden", "node_bytes", "network_bytes")
    slowest = Cost(*(max(getattr(rank, name) for rank in timelines) for name in names))
    return slowest + Cost(seconds) + _collectives(problem, spec, cluster, backward, visual)


def projection_seconds(
    problem: Problem, spec: ParallelSpec, cluster: Cluster, visual: VisualProjection | None, *, backward: bool
) -> float:
    """Return the seconds in which a rank projects features to K and V, or computes the gradients of that."""
    if visual is None:
        return 0.0
    keys = max(problem.keys) * (problem.ranks if spec.strategy == "replicate" else 1)
    seconds = 4 * problem.key_batch * keys * visual.dim * problem.kv_heads * problem.dim / cluster.matmul
    # backward: gradients, and K and V once more
    return seconds * (visual.weights_trained + visual.trained + visual.recompute) if backward else seconds


def call_timelines(
    problem: Problem,
    spec: ParallelSpec,
    cluster: Cluster,
    *,
    backward: bool,
    visible: VisibleFraction = 1.0,
    visible_rows: Sequence[Sequence[int]] | None = None,
) -> Sequence[RankTimeline]:
    """Return the timelines of ranks that represent all ranks, in the schedule of one direction of one attention call.

    Args:
        problem: the shapes of the call; `rank` is ignored.
        visible: fraction of visible entries, for all blocks or for each (0.5 for balanced causal layouts).
        visible_rows: the argument of `lv_xattn_bytes`, for LV-XAttn only: Q shards are sent among all pairs, and of
            each only the rows that attend to a key of the receiver.
    """
    if visible_rows is not None:
        spec = replace(spec, all_pairs=True)
    degree, mesh_shape, replicated = spec.head_degree, spec.mesh_shape, spec.strategy == "replicate"
    inner = problem_between_groups(problem, degree)
    ranks = ratios = None
    if replicated:  # every rank attends to all keys, which it projects itself
        inner, mesh_shape = replace(inner, keys=(sum(problem.keys),) * problem.ranks), (1, 1)
    elif 1 not in mesh_shape:
        mean = _mean_visible(visible, range(problem.ranks), range(problem.ranks))
        ranks = _mesh_ranks(inner, mesh_shape, cluster, degree, backward=backward)
        ratios = overlap_ratios_by_rates(
            problem, mesh_shape, cluster, backward=backward, head_degree=degree, visible=mean
        )

    def seconds(block: AttentionBlock, rank: int) -> float:
        i, j, keys = block.q_shard * degree, block.kv_shard * degree, inner.keys[block.kv_shard]
        rows, columns = range(i, i + degree), range(j, j + degree)
        if replicated:  # the one block has the rank's own rows and all keys
            rows, columns = range(rank, rank + 1), range(problem.ranks)
        fraction = _mean_visible(visible, rows, columns)
        return block_seconds(inner, cluster, keys, backward=backward, visible=fraction) / block.parts

    def size(transfer: Transfer, group: int) -> int:
        kind, axis, shard, length = transfer.kind, transfer.axis, transfer.send_shard, None
        if axis == "kv":
            length = inner.key_batch * inner.keys[shard]
        elif visible_rows is not None:
            length = inner.key_batch * visible_rows[shard][transfer.dst if kind == "input" else group]
        return sent_bytes(inner, spec, kind, axis, backward=backward, length=length)

    def phases(rank: int) -> list[Phase]:
        group, member = divmod(rank, degree)
        options: dict[str, Any] = {"ranks": ranks, "direct": spec.all_pairs, "overlap_ratios": ratios}
        schedule = schedule_for(mesh_shape, 0 if replicated else group, backward=backward, **options)
        return [
            Phase(
                sum(seconds(block, rank) for block in step.blocks),
                tuple((transfer.dst * degree + member, size(transfer, group)) for transfer in step.transfers),
                tuple(transfer.src * degree + member for transfer in step.transfers),
            )
            for step in schedule
        ]

    even = len(set(problem.keys)) == 1 and isinstance(visible, float | int) and visible_rows is None
    in_nodes = spec if ranks is None else replace(spec, mesh_shape=mesh_shape[::-1])
    period = symmetry_period(in_nodes, problem.ranks, cluster) if even else problem.ranks
    return simulate([phases(rank) for rank in range(period)], problem.ranks, cluster)


def _mean_visible(visible: VisibleFraction, rows: Sequence[int], columns: Sequence[int]) -> float:
    """Return the fraction of visible entries in the blocks of these ranks."""
    if isinstance(visible, float | int):
        return visible
    return sum(visible[i][j] for i in rows for j in columns) / (len(rows) * len(columns))


def block_seconds(problem: Problem, cluster: Cluster, keys: int, *, backward: bool, visible: float = 1.0) -> float:
    """Return the seconds of one block, a Q shard with `keys` keys; 0 if no entry is visible."""
    entries = problem.batch * problem.rows * keys * visible
    if not entries:
        return 0.0
    flops, rate = (10, cluster.attention_backward) if backward else (4, cluster.attention_forward)
    return flops * entries * problem.heads * problem.dim / rate + cluster.block_overhead_s


def sent_tensors(
    problem: Problem,
    spec: ParallelSpec,
    kind: TransferKind,
    axis: Axis,
    *,
    backward: bool,
    length: int | None = None,
) -> list[tuple[int, Hashable]]:
    """Return bytes and dtype of each tensor of a transfer of `length` rows or keys, over all samples.

    By default, these are the rows of one rank, or the keys of rank 0.
    """
    a, b = spec.mesh_shape
    if axis == "kv":
        keys = problem.key_batch * problem.keys[0] if length is None else length
        element = problem.element if kind == "input" else problem.result_element(b)
        return [(keys * problem.kv_heads * problem.dim * element, element)] * 2
    rows = (problem.batch * problem.rows if length is None else length) * problem.heads
    element = problem.element if kind == "input" else problem.result_element(a, direct=spec.all_pairs)
    full, lse = (rows * problem.dim * element, element), (rows * LSE_BYTES, "lse")
    if kind == "input":  # Q; with dO, the log-sum-exp and delta
        return [full, lse] * 2 if backward else [full]
    return [full] if backward else [full, lse]


def sent_bytes(*transfer: Any, **options: Any) -> int:
    """Return the bytes of one transfer (`sent_tensors`); over a schedule they add up to those of `bytes_sent`."""
    return sum(size for size, _ in sent_tensors(*transfer, **options))


def overlap_ratios_by_rates(
    problem: Problem,
    mesh_shape: tuple[int, int],
    cluster: Cluster,
    *,
    backward: bool,
    head_degree: int = 1,
    visible: float = 1.0,
) -> OverlapRatios:
    """Return how many blocks hide one transfer of each kind; a mesh orders its steps by these ratios.

    They are rounded to two digits, so that similar lengths share one (cached) order.
    """
    inner = problem_between_groups(problem, head_degree)
    keys = ceil(sum(inner.keys) / len(inner.keys))
    block = block_seconds(inner, cluster, keys, backward=backward, visible=visible)
    a, b = mesh_shape
    kv_first = _mesh_ranks(inner, mesh_shape, cluster, head_degree, backward=backward) is not None
    first = b if kv_first else a
    near = _slowest_hop(cluster, problem.ranks, distance=head_degree, span=first * head_degree)
    far = _slowest_hop(cluster, problem.ranks, distance=first * head_degree, span=a * b * head_degree)
    q_hop, kv_hop = (far, near) if kv_first else (near, far)

    def blocks(kind: TransferKind, axis: Axis) -> float:
        size = sent_bytes(inner, ParallelSpec("mesh", mesh_shape), kind, axis, backward=backward)
        rate, latency, _ = q_hop if axis == "q" else kv_hop
        seconds = latency + size / rate + cluster.step_overhead_s
        return float(f"{seconds / block:.2g}") if block else 1.0

    return OverlapRatios(
        q=blocks("input", "q"),
        kv=blocks("input", "kv"),
        o=blocks("result", "q"),
        dkv=blocks("result", "kv"),
        one_link=q_hop[2] == kv_hop[2],
    )


def _mesh_ranks(
    inner: Problem, mesh_shape: tuple[int, int], cluster: Cluster, head_degree: int, *, backward: bool
) -> tuple[int, ...] | None:
    """Return the ranks by position of a mesh of groups of `head_degree` ranks; None: by number, as if it is a ring."""
    if 1 in mesh_shape:
        return None
    nodes = tuple(rank * head_degree // cluster.gpus_per_node for rank in range(inner.ranks))
    numbers, sent = tuple(range(inner.ranks)), mesh_axis_bytes(inner, mesh_shape, backward=backward)
    ranks = mesh_ranks(numbers, nodes, mesh_shape, *sent)
    return None if ranks == numbers else ranks


def _slowest_hop(cluster: Cluster, ranks: int, *, distance: int, span: int) -> tuple[float, float, bool]:
    """Return bytes/s, latency in seconds, and whether nodes are crossed, of the slowest hop of rings of `span` ranks
    whose neighbours are `distance` ranks apart."""
    node = cluster.gpus_per_node
    if ranks <= node or (span <= node and node % span == 0):
        return cluster.node_link, cluster.node_latency_s, False
    crossing = min(distance, node)  # ranks of one node whose neighbour is on another node
    rate = min(cluster.gpu_network_link, cluster.network_link / crossing)
    return rate, cluster.network_latency_s, True


def _collectives(
    problem: Problem, spec: ParallelSpec, cluster: Cluster, backward: bool, visual: VisualProjection | None
) -> Cost:
    """Return the cost of the collectives around the schedule; no computation hides them."""
    if spec.strategy == "replicate" and problem.ranks > 1:
        # One layer's part of gathering the features, or of summing their gradients; without features, K and V.
        keys, layers = problem.key_batch * max(problem.keys), 1
        size = 2 * keys * problem.kv_heads * problem.dim
        if visual is not None:
            if backward and not visual.trained:
                return Cost()
            size, layers = keys * visual.dim, visual.layers
        cost = all_gather(cluster, problem.ranks, size * (problem.accumulated if backward else problem.element))
        seconds = cost.seconds / layers
        return Cost(seconds, seconds, 0.0, cost.node_bytes // layers, cost.network_bytes // layers)
    if spec.head_degree == 1:
        return Cost()
    q, kv = head_sharding_bytes(problem, spec.head_degree)
    if backward:  # dO, and K and V if they were recomputed; then dQ, dK, dV
        partial = _sharded_kv_heads(problem, spec.head_degree) > problem.kv_heads  # ranks share a KV head
        element = problem.result_element(spec.head_degree, direct=True)
        kv_gradients = kv // problem.element * element if partial else kv
        sizes = (q + (kv if visual is not None and visual.recompute else 0), q + kv_gradients)
    else:  # Q, K, V; then O and the log-sum-exp
        sizes = (q + kv, q + problem.batch * problem.rows * problem.heads * LSE_BYTES)
    return sum((all_to_all(cluster, problem.ranks, spec.head_degree, size) for size in sizes), Cost())


def _sharded_kv_heads(problem: Problem, degree: int) -> int:
    """Return the number of KV heads that `degree` ranks hold together; several ranks may hold the same one."""
    shards = HeadShards(problem.heads, problem.kv_heads, degree)
    return sum(len(shards.kv_heads_of(member)) for member in range(degree))


def head_sharding_bytes(problem: Problem, degree: int) -> tuple[int, int]:
    """Return the bytes of Q, and of K and V, of one rank, that an all-to-all turns into head shards."""
    rows = problem.batch * problem.rows * problem.heads
    keys = 2 * problem.key_batch * max(problem.keys) * _sharded_kv_heads(problem, degree)
    return rows * problem.dim * problem.element, keys * problem.dim * problem.element


@dataclass(frozen=True)
class Candidate(Passes):
    """A spec and the costs of a call with it; without training, backward costs nothing."""

    spec: ParallelSpec = field(kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Selection(Candidate):
    """The selected candidate, a line for the log, and all candidates, fastest first."""

    reason: str
    candidates: tuple[Candidate, ...] = field(repr=False)


def select_strategy(
    problem: Problem,
    cluster: Cluster,
    *,
    training: bool = True,
    strategies: Sequence[str] = STRATEGIES,
    mesh_shape: tuple[int, int] | None = None,
    visible_rows: Sequence[Sequence[int]] | None = None,
    **call: Any,
) -> Selection:
    """Return the fastest legal spec of an attention call: all legal candidates are simulated.

    LV-XAttn (or Ring Attention, if LV-XAttn is not a candidate) is selected unless another candidate is faster by more
    than MARGIN. The result is deterministic: ranks with the same problem and cluster select the same spec.

    Args:
        problem: the call; `problem.rank` is ignored.
        cluster: the rates to simulate with.
        training: forward and backward; False for forward only.
        strategies: the strategies to compare.
        mesh_shape: the only mesh shape to consider; None for any.
        visible_rows: rows of rank i that attend to any key of rank j, if the mask reduces what LV-XAttn sends.
        **call: further arguments of `call_cost`: visible, visual.

    Raises:
        ConfigError: no strategy is legal, or one is unknown.
    """

    def cost(spec: ParallelSpec, backward: bool) -> Cost:
        rows = visible_rows if spec.strategy == "lv-xattn" else None
        return call_cost(problem, spec, cluster, backward=backward, visible_rows=rows, **call)

    # All pairs may exchange inside a node with symmetric links. Under a mask with `visible_rows` they do so anyway.
    all_pairs = visible_rows is None and cluster.all_pairs and problem.ranks <= cluster.gpus_per_node
    candidates = [
        Candidate(cost(spec, False), cost(spec, True) if training else Cost(), spec=spec)
        for spec in candidate_specs(problem, strategies, all_pairs=all_pairs)
        if mesh_shape in (None, spec.mesh_shape)
    ]
    # LV-XAttn among all pairs must be faster than LV-XAttn around the ring, which is the first candidate beside it.
    candidates = [c for c in candidates if not c.spec.all_pairs or c.seconds * (1 + MARGIN) < candidates[0].seconds]
    if not candidates:
        raise ConfigError(
            f"strategies: none of {', '.join(strategies)} is legal for {problem.heads} heads on "
            f"{problem.ranks} ranks; allow lv-xattn or ring, which are always legal"
        )
    by_time = sorted(candidates, key=lambda candidate: candidate.seconds)  # stable: equal ones stay in order
    best, preferred = by_time[0], candidates[0]
    if preferred.spec.strategy in ("lv-xattn", "ring") and preferred.seconds <= best.seconds * (1 + MARGIN):
        best = preferred
    reason = _reason(best, by_time, problem)
    return Selection(best.forward, best.backward, spec=best.spec, reason=reason, candidates=tuple(by_time))


def _reason(best: Candidate, by_time: Sequence[Candidate], problem: Problem) -> str:
    sent = best.both.node_bytes + best.both.network_bytes
    exposed = f"{duration(best.exposed)} of it waiting"
    hidden = "all transfers hidden" if best.exposed < 0.01 * best.seconds else exposed
    fastest: dict[str, Candidate] = {}
    for candidate in by_time:
        fastest.setdefault(candidate.spec.strategy, candidate)
    slower = [candidate for name, candidate in fastest.items() if name != best.spec.strategy]
    others = ", ".join(f"{candidate.spec} {duration(candidate.seconds)}" for candidate in slower[:3])
    return (
        f"{best.spec}: {duration(best.seconds)} a call, {hidden}, {sent / 1e6:.3g} MB sent per rank "
        f"({problem.batch * problem.rows} rows, {sum(problem.keys)} keys, {problem.ranks} ranks)"
        + (f"; {others}" if others else "")
    )


def duration(seconds: float) -> str:
    """Return a duration in seconds, milliseconds or microseconds, to three digits or more."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0"
