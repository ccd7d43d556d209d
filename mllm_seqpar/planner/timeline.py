"""What the simulator takes and gives: steps of ranks as phases, and what each rank did when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["compute", "transfer", "wait"]


class Sent(NamedTuple):
    """One transfer that leaves a rank: where to, how many bytes, and what to call it."""

    to: int
    size: int
    label: str = ""


class Computed(NamedTuple):
    """One computation of a rank and what to call it."""

    seconds: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of one rank: transfers posted together, computations, then the wait for both.

    Between two ranks, transfers match in the order in which they are posted; `sources` has one entry per transfer
    that comes in.
    """

    sends: tuple[Sent, ...] = ()
    sources: tuple[int, ...] = ()
    work: tuple[Computed, ...] = ()


class TimelineSpan(NamedTuple):
    """What a rank did from `start` to `end`, seconds. A transfer stands in the timeline of the rank that sends it."""

    kind: Kind
    start: float
    end: float
    step: int
    label: str = ""


@dataclass(frozen=True)
class Timeline:
    """What the simulated ranks did. Rank r's figures are at index r; with a period, ranks beyond it are copies.

    Attributes:
        ranks: of the whole group; `period` of them were simulated.
        end: seconds at which each rank was done.
        computing: seconds of its computation.
        exposed: seconds in which it neither computed nor was done: waiting for transfers.
        hidden: seconds in which it computed while transfers of its step were under way.
        node_bytes, network_bytes: what it sent inside its node and to other nodes.
        spans: by rank, in order of time; empty unless they were asked for.
    """

    ranks: int
    period: int
    end: tuple[float, ...]
    computing: tuple[float, ...]
    exposed: tuple[float, ...]
    hidden: tuple[float, ...]
    node_bytes: tuple[int, ...]
    network_bytes: tuple[int, ...]
    spans: tuple[tuple[TimelineSpan, ...], ...]

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return max(self.end)

    @property
    def all_node_bytes(self) -> int:
        """Bytes that all ranks send inside nodes."""
        return sum(self.node_bytes) * self.ranks // self.period

    @property
    def all_network_bytes(self) -> int:
        """Bytes that all ranks send between nodes."""
        return sum(self.network_bytes) * self.ranks // self.period
