"""A plan: for each strategy a step's time by part, memory by kind, whether it fits, the longest video that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .choose import Candidate
from .cluster import Cluster
from .memory import USABLE, memory
from .run import Run
from .step import Part, cross_candidates, step_parts
from .strategies import STRATEGIES, Way

LONGEST = 2**27
"""Frames beyond which no video is looked for: four years at one frame per second."""


@dataclass(frozen=True)
class Row:
    """One strategy's step.

    Attributes:
        way: strategy and best tile.
        parts: times and bytes by part, see `step.PARTS`.
        memory: bytes of a rank by kind, see `memory.KINDS`.
        fits: whether that is within the usable share of a GPU's memory.
        longest: most frames that fit; 0: not even one.
        cross: one cross-attention call, forward and backward.
    """

    way: Way
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
    """All strategies for one run on one cluster; `rows` are sorted: what fits first, then by time."""

    run: Run
    cluster: Cluster
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]

    @property
    def best(self) -> Row:
        """The fastest that fits; if none does, the fastest."""
        return self.rows[0]


def make_plan(run: Run, cluster: Cluster, strategies: tuple[str, ...] = STRATEGIES) -> Plan:
    """Plans a run.

    Raises:
        ConfigError: an unknown strategy, or none that is legal.
    """
    candidates = cross_candidates(run, cluster, strategies)
    rows = [_row(run, cluster, candidate) for candidate in candidates.values()]
    rows.sort(key=lambda row: (not row.fits, row.seconds, STRATEGIES.index(row.way.strategy)))
    left_out = {name: _why_not(name, run) for name in strategies if name not in candidates}
    return Plan(run, cluster, tuple(rows), left_out)


def _row(run: Run, cluster: Cluster, cross: Candidate) -> Row:
    held = memory(run, cross.way)
    return Row(
        way=cross.way,
        parts=step_parts(run, cluster, cross),
        memory=held,
        fits=_fits(held, cluster),
        longest=longest_video(run, cluster, cross.way),
        cross=cross,
    )


def _fits(held: Mapping[str, int], cluster: Cluster) -> bool:
    return sum(held.values()) <= USABLE * cluster.memory_bytes


def longest_video(run: Run, cluster: Cluster, way: Way) -> int:
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


def _why_not(strategy: str, run: Run) -> str:
    if strategy == "mesh":
        return f"{run.gpus} GPUs have no tile (a, b) but (n, 1) and (1, n)"
    if strategy == "ulysses":
        return f"no group of the {run.gpus} GPUs divides {run.model.cross.heads} heads"
    return "not legal here"
