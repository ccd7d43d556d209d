"""A plan: for each strategy a step's time by part, memory by kind, whether it fits, the longest video that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .candidates import STRATEGIES, ParallelSpec
from .cluster import Cluster
from .memory import USABLE, memory
from .selection import Candidate, SelectionOptions
from .step_cost import Part, cross_candidates, self_candidate, step_parts
from .workload import Workload

LONGEST = 2**27
"""Frames beyond which no video is looked for: four years at one frame per second."""
MOST_GPUS = 2**16


@dataclass(frozen=True)
class StrategyPlan:
    """One strategy's step.

    Attributes:
        way: strategy, and the best tile of those that fit.
        parts: times and bytes by part, see `step.PARTS`.
        memory: bytes of a rank by kind, see `memory.KINDS`.
        fits: whether that is within the usable share of a GPU's memory.
        longest: most frames that fit; 0: not even one.
        cross: one cross-attention call, forward and backward.
    """

    way: ParallelSpec
    parts: Mapping[str, Part]
    memory: Mapping[str, int]
    fits: bool
    longest: int
    cross: Candidate

    @property
    def forward(self) -> float:
        """Seconds."""
        return sum(part.forward for part in self.parts.values())

    @property
    def backward(self) -> float:
        """Seconds."""
        return sum(part.backward for part in self.parts.values())

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Plan:
    """All strategies for one run on one cluster.

    Attributes:
        run, cluster: what was planned, and for what.
        rows: what fits first, then by time.
        left_out: strategies that are not legal, and why.
        text: one call of self-attention, the same for all rows.
        enough: the least power of two of GPUs on which LV-XAttn, which holds least, fits; None: no number does.
    """

    run: Workload
    cluster: Cluster
    rows: tuple[StrategyPlan, ...]
    left_out: Mapping[str, str]
    text: Candidate
    enough: int | None

    @property
    def best(self) -> StrategyPlan:
        """The fastest that fits, or if none does, the fastest; LV-XAttn where it is hardly slower, as in `choose`."""
        first = self.rows[0]
        lv = next((row for row in self.rows if row.way.strategy == "lv-xattn"), first)
        near = lv.seconds <= first.seconds * (1 + SelectionOptions().margin)
        return lv if near and lv.fits == first.fits else first


def make_plan(run: Workload, cluster: Cluster, strategies: Sequence[str] = STRATEGIES) -> Plan:
    """Plans a run.

    Raises:
        ConfigError: an unknown strategy, none that is legal, or a cluster without the speeds that it takes.
    """
    cluster.check_ranks(run.gpus)
    found, text = cross_candidates(run, cluster, tuple(strategies)), self_candidate(run, cluster)
    rows = [_row(run, cluster, candidates, text) for candidates in found.values()]
    rows.sort(key=lambda row: (not row.fits, row.seconds, STRATEGIES.index(row.way.strategy)))
    left_out = {name: _why_not(name, run) for name in strategies if name not in found}
    return Plan(run, cluster, tuple(rows), left_out, text, _enough(run, cluster))


def _row(run: Workload, cluster: Cluster, candidates: Sequence[Candidate], text: Candidate) -> StrategyPlan:
    """The fastest of one strategy's ways that fits, or the fastest."""
    cross = next((c for c in candidates if _fits(memory(run, c.way), cluster)), candidates[0])
    held = memory(run, cross.way)
    return StrategyPlan(
        way=cross.way,
        parts=step_parts(run, cluster, cross, text),
        memory=held,
        fits=_fits(held, cluster),
        longest=longest_video(run, cluster, cross.way),
        cross=cross,
    )


def _fits(held: Mapping[str, int], cluster: Cluster) -> bool:
    return sum(held.values()) <= USABLE * cluster.memory_bytes


def longest_video(run: Workload, cluster: Cluster, way: ParallelSpec) -> int:
    """Most frames whose memory fits, with the same text; 0 if one frame does not."""

    def fits(frames: int) -> bool:
        return _fits(memory(replace(run, frames=frames), way), cluster)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _enough(run: Workload, cluster: Cluster) -> int | None:
    gpus = 1
    while gpus <= MOST_GPUS:
        if _fits(memory(replace(run, gpus=gpus), ParallelSpec("lv-xattn", (gpus, 1))), cluster):
            return gpus
        gpus *= 2
    return None


def _why_not(strategy: str, run: Workload) -> str:
    if run.gpus == 1:
        return "one GPU has nobody to share with"
    if strategy == "mesh":
        return f"{run.gpus} GPUs have no tile (a, b) but (n, 1) and (1, n)"
    if strategy == "ulysses":
        return f"no group of the {run.gpus} GPUs divides {run.model.cross.heads} heads"
    return "not legal here"
