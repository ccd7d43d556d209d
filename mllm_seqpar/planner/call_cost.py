"""One attention call: the specs that can compute it, their costs, and the selection of the fastest.

The schedule of a spec is simulated with the FLOPs and bytes of closed formulas. Attention counts ATTENTION_FLOPS.
Projecting K and V from visual features costs 4 d_vis G D FLOPs per key; backward costs twice that for the gradients,
and once more where K and V are recomputed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from math import ceil
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.runtime.strategy_selector import VisualProjection
from mllm_seqpar.schedules import Axis, OverlapRatios, TransferKind, schedule_for
from mllm_seqpar.schedules.bytes_sent import (
    LSE_BYTES,
    Problem,
    mesh_axis_bytes,
    problem_between_groups,
    transfer_bytes,
)
from mllm_seqpar.schedules.head_sharding import HeadShards
from mllm_seqpar.schedules.mesh import mesh_ranks
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES, ParallelSpec

from .cluster import ATTENTION_FLOPS, Cluster, Cost, Passes, all_gather, all_to_all
from .simulation import Phase, RankTimeline, simulate

MARGIN = 0.02
"""Relative differences in predicted time below this value are ignored."""

VisibleFraction = float | Sequence[Sequence[float]]
"""Fraction of visible entries: one number for all blocks, or [i][j] for block (i, j)."""


def candidate_specs(
    problem: Problem, strategies: Sequence[str] = STRATEGIES, *, all_pairs: bool = False
) -> Iterator[ParallelSpec]:
    """Yield all legal specs of `strategies` in the order of STRATEGIES; raise ConfigError for an unknown strategy.

    `all_pairs` includes LV-XAttn among all pairs of ranks. With 2 ranks it is the ring.
    """
    unknown = sorted(set(strategies) - {*STRATEGIES, "local"})
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
        ParallelSpec("local", (1, 1)),
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


@dataclass(frozen=True)
class AttentionCall:
    """One direction of one attention call with a spec on a cluster."""

    problem: Problem  # `rank` is ignored
    spec: ParallelSpec
    cluster: Cluster
    _: KW_ONLY
    backward: bool
    visible: VisibleFraction = 1.0  # 0.5 for balanced causal layouts
    # The argument of `mesh_bytes`, for LV-XAttn only: Q shards are sent among all pairs, and of each only the rows that
    # attend to a key of the receiver.
    visible_rows: Sequence[Sequence[int]] | None = None
    visual: VisualProjection | None = None  # None if K and V are given
    masked: bool = False  # whether blocks have frame masks, which kernels compute at rates of their own

    @property
    def cost(self) -> Cost:
        """The cost of the schedule, of projecting K and V or the gradients of that, and of collectives around it."""
        timelines, names = self.timelines(), (field.name for field in fields(Cost))
        slowest = Cost(*(max(getattr(rank, name) for rank in timelines) for name in names))
        return slowest + Cost(self.projection_seconds) + self._collectives

    @property
    def projection_seconds(self) -> float:
        """The seconds in which a rank projects features to K and V, or computes the gradients of that."""
        problem, visual = self.problem, self.visual
        if visual is None:
            return 0.0
        keys = max(problem.keys) * (problem.ranks if self._replicated else 1)
        seconds = 4 * problem.key_batch * keys * visual.dim * problem.kv_heads * problem.dim / self.cluster.matmul
        # backward: gradients, and K and V once more
        return seconds * (visual.weights_trained + visual.trained + visual.recompute if self.backward else 1)

    def timelines(self) -> Sequence[RankTimeline]:
        """Return the timelines of ranks that represent all ranks."""
        ranks, spec = self.problem.ranks, self.spec
        even = len(set(self.problem.keys)) == 1 and isinstance(self.visible, float | int) and self.visible_rows is None
        if self._order is not None:
            spec = replace(spec, mesh_shape=spec.mesh_shape[::-1])
        period = symmetry_period(spec, ranks, self.cluster) if even else ranks
        return simulate([self._phases(rank) for rank in range(period)], ranks, self.cluster)

    def _phases(self, rank: int) -> list[Phase]:
        degree = self.spec.head_degree
        group, member = divmod(rank, degree)
        schedule = schedule_for(
            (1, 1) if self._replicated else self.spec.mesh_shape,
            0 if self._replicated else group,
            backward=self.backward,
            ranks=self._order,
            direct=self._direct,
            overlap_ratios=None if 1 in self.spec.mesh_shape else self.overlap_ratios,
        )
        phases = []
        for step in schedule:
            seconds, sends = 0.0, []
            for block in step.blocks:
                rows, columns = (range(x * degree, (x + 1) * degree) for x in (block.q_shard, block.kv_shard))
                if self._replicated:  # the one block has the rank's own rows and all keys
                    rows, columns = range(rank, rank + 1), range(self.problem.ranks)
                visible = self._mean_visible(rows, columns)
                seconds += self._seconds(self._inner.keys[block.kv_shard], visible) / block.parts
            for transfer in step.transfers:
                shard, length = transfer.send_shard, None
                if transfer.axis == "kv":
                    length = self._inner.key_batch * self._inner.keys[shard]
                elif self.visible_rows is not None:
                    to = transfer.dst if transfer.kind == "input" else group
                    length = self._inner.key_batch * self.visible_rows[shard][to]
                size = self._transfer_bytes(transfer.kind, transfer.axis, length)
                sends.append((transfer.dst * degree + member, size))
            sources = tuple(transfer.src * degree + member for transfer in step.transfers)
            phases.append(Phase(seconds, tuple(sends), sources))
        return phases

    def _seconds(self, keys: int, visible: float) -> float:
        """Return the seconds of a block, a Q shard with `keys` keys; 0 if no entry is visible."""
        inner, cluster = self._inner, self.cluster
        entries = inner.batch * inner.rows * keys * visible
        if not entries:
            return 0.0
        rate, masked = cluster.attention_forward, cluster.masked_forward
        if self.backward:
            rate, masked = cluster.attention_backward, cluster.masked_backward
        rate = masked if self.masked and masked is not None else rate
        return ATTENTION_FLOPS[self.backward] * entries * inner.heads * inner.dim / rate + cluster.block_overhead_s

    def _mean_visible(self, rows: Sequence[int], columns: Sequence[int]) -> float:
        """Return the fraction of visible entries in the blocks of these ranks."""
        if isinstance(self.visible, float | int):
            return self.visible
        return sum(self.visible[i][j] for i in rows for j in columns) / (len(rows) * len(columns))

    def _transfer_bytes(self, kind: TransferKind, axis: Axis, length: int | None = None) -> int:
        options = {"backward": self.backward, "direct": self._direct, "length": length}
        return transfer_bytes(self._inner, self.spec.mesh_shape, kind, axis, **options)

    @property
    def _replicated(self) -> bool:
        return self.spec.strategy == "replicate"

    @property
    def _direct(self) -> bool:
        return self.spec.all_pairs or self.visible_rows is not None

    @cached_property
    def _inner(self) -> Problem:
        """The problem that groups of ranks solve after head sharding; with replicated features, all keys are local."""
        if self._replicated:
            return replace(self.problem, keys=(sum(self.problem.keys),) * self.problem.ranks)
        return problem_between_groups(self.problem, self.spec.head_degree)

    @cached_property
    def _order(self) -> tuple[int, ...] | None:
        """The groups of ranks by position in a mesh; None: by number, as in a ring."""
        inner, shape = self._inner, self.spec.mesh_shape
        if 1 in shape:
            return None
        nodes = tuple(rank * self.spec.head_degree // self.cluster.gpus_per_node for rank in range(inner.ranks))
        numbers, sent = tuple(range(inner.ranks)), mesh_axis_bytes(inner, shape, backward=self.backward)
        ranks = mesh_ranks(numbers, nodes, shape, *sent)
        return None if ranks == numbers else ranks

    @cached_property
    def overlap_ratios(self) -> OverlapRatios:
        """How many blocks hide one transfer of each kind; a mesh orders its steps by these ratios.

        They are rounded to two digits, so that similar lengths share one (cached) order.
        """
        every, (a, b), degree = range(self.problem.ranks), self.spec.mesh_shape, self.spec.head_degree
        block = self._seconds(ceil(sum(self._inner.keys) / self._inner.ranks), self._mean_visible(every, every))
        kv_first = self._order is not None
        first = b if kv_first else a
        near = self._slowest_hop(distance=degree, span=first * degree)
        far = self._slowest_hop(distance=first * degree, span=a * b * degree)
        q_hop, kv_hop = (far, near) if kv_first else (near, far)

        def blocks(kind: TransferKind, axis: Axis) -> float:
            rate, latency, _ = q_hop if axis == "q" else kv_hop
            seconds = latency + self._transfer_bytes(kind, axis) / rate + self.cluster.step_overhead_s
            return float(f"{seconds / block:.2g}") if block else 1.0

        return OverlapRatios(
            q=blocks("input", "q"),
            kv=blocks("input", "kv"),
            o=blocks("result", "q"),
            dkv=blocks("result", "kv"),
            one_link=q_hop[2] == kv_hop[2],
        )

    def _slowest_hop(self, *, distance: int, span: int) -> tuple[float, float, bool]:
        """Return bytes/s, latency in seconds, and whether nodes are crossed, of the slowest hop of rings of `span`
        ranks whose neighbours are `distance` ranks apart."""
        cluster, node = self.cluster, self.cluster.gpus_per_node
        if self.problem.ranks <= node or (span <= node and node % span == 0):
            return cluster.node_link, cluster.node_latency_s, False
        crossing = min(distance, node)  # ranks of one node whose neighbour is on another node
        rate = min(cluster.gpu_network_link, cluster.network_link / crossing)
        return rate, cluster.network_latency_s, True

    @property
    def _collectives(self) -> Cost:
        """The cost of the collectives around the schedule; no computation hides them."""
        problem, visual, backward, degree = self.problem, self.visual, self.backward, self.spec.head_degree
        if self._replicated and problem.ranks > 1:
            # One layer's part of gathering the features, or of summing their gradients; without features, K and V.
            keys, layers = problem.key_batch * max(problem.keys), 1
            size = 2 * keys * problem.kv_heads * problem.dim
            if visual is not None:
                if backward and not visual.trained:
                    return Cost()
                size, layers = keys * visual.dim, visual.layers
            size *= problem.accumulated if backward else problem.element
            cost = all_gather(self.cluster, problem.ranks, size)
            seconds = cost.seconds / layers
            return Cost(seconds, seconds, 0.0, cost.node_bytes // layers, cost.network_bytes // layers)
        if degree == 1:
            return Cost()
        q, kv, partial = self.head_shard_bytes
        if backward:  # dO, and K and V if they were recomputed; then dQ, dK, dV
            element = problem.result_element(degree, direct=True)
            kv_gradients = kv // problem.element * element if partial else kv
            sizes = (q + (kv if visual is not None and visual.recompute else 0), q + kv_gradients)
        else:  # Q, K, V; then O and the log-sum-exp
            sizes = (q + kv, q + problem.batch * problem.rows * problem.heads * LSE_BYTES)
        return sum((all_to_all(self.cluster, problem.ranks, degree, size) for size in sizes), Cost())

    @property
    def head_shard_bytes(self) -> tuple[int, int, bool]:
        """Bytes of Q, and of K and V, of a rank that an all-to-all turns into head shards; whether ranks share a head
        of K and V."""
        problem, degree = self.problem, self.spec.head_degree
        shards = HeadShards(problem.heads, problem.kv_heads, degree)
        kv_heads = sum(len(shards.kv_heads_of(member)) for member in range(degree))
        head = problem.dim * problem.element
        kv = 2 * problem.key_batch * max(problem.keys) * kv_heads * head
        return problem.batch * problem.rows * problem.heads * head, kv, kv_heads > problem.kv_heads


def with_overlap_ratios(
    spec: ParallelSpec, problem: Problem, cluster: Cluster, visible: VisibleFraction = 1.0
) -> ParallelSpec:
    """Return the spec with the overlap ratios of a mesh on a cluster; other shapes have none."""
    if 1 in spec.mesh_shape:
        return spec
    forward, backward = (
        AttentionCall(problem, spec, cluster, backward=b, visible=visible).overlap_ratios for b in (False, True)
    )
    return replace(spec, overlap_ratios=(forward, backward))


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
        training: forward and backward; False for forward only.
        mesh_shape: the only mesh shape to consider; None for any.
        visible_rows: rows of rank i that attend to any key of rank j, if the mask reduces what LV-XAttn sends.
        **call: further attributes of `AttentionCall`: visible, visual, masked.

    Raises:
        ConfigError: no strategy is legal, or one is unknown.
    """

    def cost(spec: ParallelSpec, backward: bool) -> Cost:
        rows = visible_rows if spec.strategy == "lv-xattn" else None
        return AttentionCall(problem, spec, cluster, backward=backward, visible_rows=rows, **call).cost

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
