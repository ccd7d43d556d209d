"""Candidate parallel specs of one attention call, and how a spec changes the problem that its schedule solves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules.bytes_sent import Problem
from mllm_seqpar.schedules.head_sharding import HeadShards
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES

from .cluster import Cluster


@dataclass(frozen=True)
class ParallelSpec:
    """The strategy, mesh shape and head-sharding degree of one attention call.

    Attributes:
        strategy: one of STRATEGIES.
        mesh_shape: (a, b), Q shards by KV shards; of the ranks, or of the groups of `head_degree` ranks.
        head_degree: the number of consecutive ranks that shard the heads by all-to-all (Ulysses); 1 for none.
        all_pairs: whether LV-XAttn sends Q shards point to point even if no mask requires it.
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


def problem_between_groups(problem: Problem, head_degree: int) -> Problem:
    """Return the problem that groups of `head_degree` ranks solve after head sharding: longer shards, fewer heads."""
    if head_degree == 1:
        return problem
    keys, shards = problem.keys, HeadShards(problem.heads, problem.kv_heads, head_degree)
    return replace(
        problem,
        rows=problem.rows * head_degree,
        keys=tuple(sum(keys[i : i + head_degree]) for i in range(0, len(keys), head_degree)),
        heads=problem.heads // head_degree,
        kv_heads=max(shards.computed_kv_heads(member) for member in range(head_degree)),
        rank=problem.rank // head_degree,
    )


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
