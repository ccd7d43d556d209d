"""The ways to compute one attention call over n ranks, and which of them are legal for a problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules.bytes_sent import Problem
from mllm_seqpar.schedules.head_sharding import HeadShards

from .cluster import Cluster

STRATEGIES = ("lv-xattn", "ring", "mesh", "ulysses", "replicate")
"""In the order in which equal costs are decided. Star Attention is approximate: it is never among them."""
# Rows and keys of text are as many: moving Q, O and the log-sum-exp is never less than moving K and V.
TEXT_STRATEGIES = ("ring", "mesh", "ulysses")
"""Those that `self_attention="auto"` chooses among."""


@dataclass(frozen=True)
class ParallelSpec:
    """One way to compute a call.

    Attributes:
        strategy: one of STRATEGIES.
        tile: (a, b), over the ranks, or over the groups of `heads_over` ranks.
        heads_over: ranks that share out heads by all-to-all (Ulysses), consecutive ones; 1: none do.
    """

    strategy: str
    tile: tuple[int, int]
    heads_over: int = 1

    def __str__(self) -> str:
        if self.strategy == "mesh":
            return f"mesh {self.tile[0]}x{self.tile[1]}"
        if self.strategy == "ulysses" and self.tile != (1, 1):
            return f"ulysses {self.heads_over} x tile {self.tile[0]}x{self.tile[1]}"
        return self.strategy


def ways(problem: Problem, strategies: Sequence[str] = STRATEGIES) -> Iterator[ParallelSpec]:
    """All legal ways for a problem, those of `strategies` only, in the order of STRATEGIES.

    Raises:
        ConfigError: an unknown strategy.
    """
    unknown = sorted(set(strategies) - set(STRATEGIES))
    if unknown:
        raise ConfigError(f"strategies: {', '.join(unknown)} cannot be planned; choose of {', '.join(STRATEGIES)}")
    n = problem.ranks
    if "lv-xattn" in strategies:
        yield ParallelSpec("lv-xattn", (n, 1))
    if "ring" in strategies:
        yield ParallelSpec("ring", (1, n))
    if "mesh" in strategies:
        yield from (ParallelSpec("mesh", (a, n // a)) for a in divisors(n) if 1 < a < n)
    if "ulysses" in strategies:
        for group in reversed(divisors(n)):
            if group > 1 and problem.heads % group == 0:
                outer = n // group
                for a in divisors(outer):
                    yield ParallelSpec("ulysses", (a, outer // a), group)
    if "replicate" in strategies:
        yield ParallelSpec("replicate", (n, 1))


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    return [a for a in range(1, n + 1) if n % a == 0]


def problem_within_groups(problem: Problem, group: int) -> Problem:
    """The problem that groups of `group` ranks solve once heads are shared out: more rows and keys, fewer heads."""
    if group == 1:
        return problem
    keys, shares = problem.keys, HeadShards(problem.heads, problem.kv_heads, group)
    return replace(
        problem,
        rows=problem.rows * group,
        keys=tuple(sum(keys[i : i + group]) for i in range(0, len(keys), group)),
        heads=problem.heads // group,
        kv_heads=max(shares.computed_kv_heads(place) for place in range(group)),
        rank=problem.rank // group,
    )


def period_of(way: ParallelSpec, ranks: int, cluster: Cluster) -> int:
    """How many ranks stand for all, where shares are even: the least shift that maps the schedules on themselves.

    Shifting by whole row groups does, shifting inside every row group does; and nodes must map on nodes.
    """
    a, group, node = way.tile[0], way.heads_over, cluster.gpus_per_node
    alone = ranks <= node
    for period in divisors(ranks):
        if period % group or (not alone and period % node):
            continue
        shift = period // group
        if shift % a == 0 or (a % shift == 0 and (alone or a * group % node == 0)):
            return period
    return ranks
