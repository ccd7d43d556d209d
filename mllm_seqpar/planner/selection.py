"""The cheapest way to compute an attention call: all legal ones are simulated, the least time wins.

Pure and deterministic: ranks that are given the same problem and cluster choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules.bytes_sent import Problem

from .call_cost import CallCost, Entries, call_cost
from .call_overheads import Visual
from .candidates import STRATEGIES, ParallelSpec, ways
from .cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """What a choice is made for.

    Attributes:
        training: forward and backward; False: forward only.
        strategies: those that may be chosen.
        visible: share of visible entries, of every block or per block.
        causal: rows see no later keys, in a balanced layout: half of every block.
        seen: rows of rank i that see any key of rank j, where a mask prunes what LV-XAttn sends.
        visual: where the keys come from; None: the text's own, which every layer computes anyway.
        overlap: transfers under computation.
        hybrid: Ulysses also over part of the ranks, with a tile over the rest.
        tile: only ways with this one; None: any.
        margin: by what share another way must be cheaper than LV-XAttn, or than Ring Attention where that is not among
            them: predictions are no better than that.
    """

    training: bool = True
    strategies: Sequence[str] = STRATEGIES
    visible: Entries = 1.0
    causal: bool = False
    seen: Sequence[Sequence[int]] | None = None
    visual: Visual | None = None
    overlap: bool = True
    hybrid: bool = True
    tile: tuple[int, int] | None = None
    margin: float = 0.02


@dataclass(frozen=True)
class Candidate:
    """One way and what it takes."""

    way: ParallelSpec
    forward: CallCost
    backward: CallCost | None

    @property
    def seconds(self) -> float:
        """Of forward, and backward if there is one."""
        return self.forward.seconds + (self.backward.seconds if self.backward else 0.0)

    @property
    def exposed(self) -> float:
        """Seconds of transfers that nothing hides."""
        return self.forward.exposed + (self.backward.exposed if self.backward else 0.0)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends."""
        both = [self.forward] + ([self.backward] if self.backward else [])
        return sum(cost.node_bytes + cost.network_bytes for cost in both)


@dataclass(frozen=True)
class Selection:
    """What was chosen, and from what.

    Attributes:
        strategy, tile, heads_over: see `Way`.
        seconds: what it should take, forward and backward.
        why: one line.
        table: all candidates, cheapest first.
    """

    strategy: str
    tile: tuple[int, int]
    heads_over: int
    seconds: float
    why: str
    table: tuple[Candidate, ...] = field(repr=False)


def choose(problem: Problem, cluster: Cluster, *, options: SelectionOptions | None = None) -> Selection:
    """The cheapest legal way.

    Args:
        problem: the call as ranks see it; `rank` plays no part.
        cluster: where it runs.
        options: see `SelectionOptions`.

    Raises:
        ConfigError: no way is legal.
    """
    options = options or SelectionOptions()
    found = [
        _candidate(problem, way, cluster, options)
        for way in ways(problem, options.strategies)
        if options.tile in (None, way.tile) and (options.hybrid or way.strategy != "ulysses" or way.tile == (1, 1))
    ]
    if not found:
        raise ConfigError(
            f"strategies: none of {', '.join(options.strategies)} is legal for {problem.heads} heads on "
            f"{problem.ranks} ranks; allow lv-xattn, or ring, which always are"
        )
    first = found[0]  # LV-XAttn, or Ring Attention, where they may be chosen
    table = sorted(found, key=lambda candidate: candidate.seconds)  # stable: equal ones stay in order
    best = table[0]
    if first.way.strategy in ("lv-xattn", "ring") and first.seconds <= best.seconds * (1 + options.margin):
        best = first
    way = best.way
    return Selection(way.strategy, way.tile, way.heads_over, best.seconds, _why(best, table, problem), tuple(table))


def _candidate(problem: Problem, way: ParallelSpec, cluster: Cluster, options: SelectionOptions) -> Candidate:
    visible: Entries = options.visible
    if options.causal:
        visible = visible / 2 if isinstance(visible, float | int) else [[x / 2 for x in row] for row in visible]

    def cost(backward: bool) -> CallCost:
        return call_cost(
            problem,
            way,
            cluster,
            backward=backward,
            visible=visible,
            seen=options.seen if way.strategy == "lv-xattn" else None,
            visual=options.visual,
            overlap=options.overlap,
        )

    return Candidate(way, cost(False), cost(True) if options.training else None)


def _why(best: Candidate, table: Sequence[Candidate], problem: Problem) -> str:
    hidden = "all transfers hidden" if best.exposed < 0.01 * best.seconds else f"{_time(best.exposed)} of it waiting"
    rest = [candidate for candidate in table if candidate is not best]
    others = ", ".join(f"{candidate.way} {_time(candidate.seconds)}" for candidate in _one_of_each(rest, best)[:3])
    return (
        f"{best.way}: {_time(best.seconds)} a call, {hidden}, {best.sent / 1e6:.3g} MB sent per rank "
        f"({problem.batch * problem.rows} rows, {sum(problem.keys)} keys, {problem.ranks} ranks)"
        + (f"; {others}" if others else "")
    )


def _one_of_each(table: Sequence[Candidate], best: Candidate) -> list[Candidate]:
    """The cheapest of each other strategy."""
    kept: dict[str, Candidate] = {}
    for candidate in table:
        if candidate.way.strategy != best.way.strategy:
            kept.setdefault(candidate.way.strategy, candidate)
    return list(kept.values())


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
