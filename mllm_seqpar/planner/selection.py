"""Selection of the fastest spec for an attention call: all legal candidates are simulated.

The result is deterministic: ranks with the same problem and cluster select the same spec.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules.bytes_sent import Problem

from .call_cost import CallCost, call_cost
from .candidates import STRATEGIES, ParallelSpec, candidate_specs
from .cluster import Cluster
from .costs import Cost, Passes

MARGIN = 0.02
"""Relative differences in predicted time below this value are ignored."""


@dataclass(frozen=True)
class Candidate(Passes):
    """A spec and its costs, as a `CallCost` for each pass; without training, backward costs nothing."""

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
    margin: float = MARGIN,
    **call: Any,
) -> Selection:
    """Return the fastest legal spec.

    Args:
        problem: the call; `problem.rank` is ignored.
        cluster: the rates to simulate with.
        training: forward and backward; False for forward only.
        strategies: the strategies to compare.
        mesh_shape: the only mesh shape to consider; None for any.
        visible_rows: rows of rank i that attend to any key of rank j, if the mask reduces what LV-XAttn sends.
        margin: the fraction by which another candidate must be faster than LV-XAttn (or Ring Attention, if LV-XAttn is
            not a candidate) to be selected.
        **call: further arguments of `call_cost`: visible, visual, overlap.

    Raises:
        ConfigError: no strategy is legal, or one is unknown.
    """

    def cost(spec: ParallelSpec, backward: bool) -> CallCost:
        rows = visible_rows if spec.strategy == "lv-xattn" else None
        return call_cost(problem, spec, cluster, backward=backward, visible_rows=rows, **call)

    # Under a mask that makes (row, rank) pairs empty, the schedule is direct anyway.
    all_pairs = visible_rows is None and cluster.pairs_exchange(problem.ranks)
    candidates = [
        Candidate(cost(spec, False), cost(spec, True) if training else Cost(), spec=spec)
        for spec in candidate_specs(problem, strategies, all_pairs=all_pairs)
        if mesh_shape in (None, spec.mesh_shape)
    ]
    # LV-XAttn among all pairs must be faster than LV-XAttn around the ring, which is the first candidate beside it.
    candidates = [c for c in candidates if not c.spec.all_pairs or c.seconds * (1 + margin) < candidates[0].seconds]
    if not candidates:
        raise ConfigError(
            f"strategies: none of {', '.join(strategies)} is legal for {problem.heads} heads on "
            f"{problem.ranks} ranks; allow lv-xattn or ring, which are always legal"
        )
    by_time = sorted(candidates, key=lambda candidate: candidate.seconds)  # stable: equal ones stay in order
    best, preferred = by_time[0], candidates[0]
    if preferred.spec.strategy in ("lv-xattn", "ring") and preferred.seconds <= best.seconds * (1 + margin):
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
