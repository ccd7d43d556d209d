"""Event simulation of ranks that compute and exchange on shared links. Plain Python, without torch.

A rank's step begins when its previous step has ended. The rank posts the step's transfers together, computes its blocks
meanwhile, and ends the step when both are done, as the executor does. A transfer starts once both its ends have posted
it, takes its latency, and then shares links evenly with all other transfers on them: a rank's own link inside its node,
and a node's one link to the other nodes, each with a speed per direction.

Where the schedules of all ranks are equal up to a shift by `period` ranks, it is enough to simulate that many. Rank r
then represents all ranks that equal r modulo the period, and what it sends to such a copy arrives at itself.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

from .cluster import Cluster


class SentMessage(NamedTuple):
    """One transfer that a rank sends: destination rank, bytes, and a label for figures."""

    to: int
    size: int
    label: str = ""


class Computation(NamedTuple):
    """One computation of a rank: seconds, and a label for figures."""

    seconds: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of one rank: transfers that are posted together, and computations.

    Between two ranks, transfers match in the order of posting. `sources` has one entry per incoming transfer.
    """

    sends: tuple[SentMessage, ...] = ()
    sources: tuple[int, ...] = ()
    work: tuple[Computation, ...] = ()


class TimelineSpan(NamedTuple):
    """An activity of a rank from `start` to `end`, in seconds. A transfer belongs to the rank that sends it."""

    kind: Literal["compute", "transfer", "wait"]
    start: float
    end: float
    step: int
    label: str = ""


@dataclass(slots=True)
class RankTimeline:
    """What one rank does until it ends after `seconds`, `computing` of which it computes.

    `exposed` are the seconds in which it waits, `hidden` those in which it computes while its step's transfers are in
    flight. `spans` are its activities, ordered by time; empty unless they were recorded.
    """

    seconds: float = 0.0
    computing: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    node_bytes: int = 0
    network_bytes: int = 0
    spans: list[TimelineSpan] = field(default_factory=list)
    # During the simulation: the step, when it began, its transfers that have not ended, and when the last one ended.
    step: int = field(default=-1, repr=False)
    begin: float = field(default=0.0, repr=False)
    pending: int = field(default=0, repr=False)
    transfers_done: float = field(default=0.0, repr=False)


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation of `ranks` ranks: the ranks of one period, which represent the others."""

    ranks: int
    by_rank: tuple[RankTimeline, ...]

    @property
    def period(self) -> int:
        return len(self.by_rank)

    def most(self, name: str) -> Any:
        """Return the largest value of a field of all ranks."""
        return max(getattr(rank, name) for rank in self.by_rank)

    @property
    def seconds(self) -> float:
        return float(self.most("seconds"))


def simulate(
    phases: Sequence[Sequence[Phase]], ranks: int, cluster: Cluster, *, overlap: bool = True, record: bool = False
) -> Timeline:
    """Return the timeline of each rank's phases on the cluster.

    Args:
        phases: the phases of each simulated rank: of all ranks, or of a period of ranks that represents the others.
        ranks: the size of the whole group; transfers name its ranks.
        overlap: False computes a step's blocks after its transfers.

    Raises:
        ValueError: `phases` do not divide `ranks`, or a transfer is never posted at its other end.
    """
    if not phases or ranks % len(phases):
        raise ValueError(f"simulate: {len(phases)} simulated ranks do not divide {ranks} ranks")
    return _Simulation(phases, ranks, cluster, overlap, record).run()


_Port = tuple[str, int]
"""One direction of a link: its kind (see `_Simulation.capacity`), and the rank or node that it belongs to."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer between two simulated ranks; `remaining` bytes at time `since`, moving at `rate`."""

    source: int
    to: int
    message: SentMessage
    step: int
    ports: tuple[_Port, ...]
    latency: float
    remaining: float
    rate: float = 0.0
    since: float = 0.0
    start: float = 0.0
    version: int = 0


class _Simulation:
    def __init__(
        self, phases: Sequence[Sequence[Phase]], ranks: int, cluster: Cluster, overlap: bool, record: bool
    ) -> None:
        self.phases, self.ranks, self.cluster, self.record = phases, ranks, cluster, record
        self.period = len(phases)
        self.serial = 1.0 - cluster.overlap if overlap else 1.0
        """Fraction of a step's computation that cannot run while its transfers are in flight."""
        self.by_rank = [RankTimeline() for _ in phases]
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.event_count = 0
        self.posted: defaultdict[tuple[int, int], deque[tuple[float, _Transfer]]] = defaultdict(deque)
        self.expected: defaultdict[tuple[int, int], deque[float]] = defaultdict(deque)
        self.on_port: defaultdict[_Port, dict[int, _Transfer]] = defaultdict(dict)
        self.changed: set[_Port] = set()
        rates = {"": cluster.node_link, "card ": cluster.gpu_network_link, "node ": cluster.network_link}
        self.capacity = {f"{link}{way}": rate for link, rate in rates.items() for way in ("out", "in")}

    def run(self) -> Timeline:
        for rank in range(self.period):
            self._at(0.0, partial(self._begin_step, rank))
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] <= now * (1 + 1e-12):
                heappop(self.events)[2](now)
            if self.changed:
                self._update_rates(now)
        for rank, state in enumerate(self.by_rank):
            if state.step < len(self.phases[rank]):
                raise ValueError(f"simulate: rank {rank} waits forever in step {state.step}")
            state.spans.sort(key=lambda span: (span.start, span.end))
        return Timeline(self.ranks, tuple(self.by_rank))

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        self.event_count += 1
        heappush(self.events, (time, self.event_count, event))

    def _begin_step(self, rank: int, now: float) -> None:
        state = self.by_rank[rank]
        state.step += 1
        state.begin = state.seconds = state.transfers_done = now
        if state.step == len(self.phases[rank]):
            return
        phase = self.phases[rank][state.step]
        posted = now + (self.cluster.step_overhead_s if phase.sends or phase.sources else 0.0)
        state.pending = len(phase.sends) + len(phase.sources)
        for message in phase.sends:
            self._post(rank, message, posted)
        for source in phase.sources:
            self.expected[source % self.period, rank].append(posted)
            self._match(source % self.period, rank)
        if not state.pending:
            self._end_step(rank)

    def _post(self, rank: int, message: SentMessage, now: float) -> None:
        to, cluster, state = message.to % self.period, self.cluster, self.by_rank[rank]
        node = cluster.gpus_per_node
        if rank // node == message.to // node:
            ports: tuple[_Port, ...] = (("out", rank), ("in", to))
            latency, state.node_bytes = cluster.node_latency_s, state.node_bytes + message.size
        else:
            ports = (("card out", rank), ("card in", to), ("node out", rank // node), ("node in", to // node))
            latency, state.network_bytes = cluster.network_latency_s, state.network_bytes + message.size
        if not message.size:  # empty shards are not sent
            ports, latency = (), 0.0
        transfer = _Transfer(rank, to, message, state.step, ports, latency, remaining=float(message.size))
        self.posted[rank, to].append((now, transfer))
        self._match(rank, to)

    def _match(self, source: int, to: int) -> None:
        """Start the next transfer between two ranks once both have posted it."""
        posted, expected = self.posted[source, to], self.expected[source, to]
        if posted and expected:
            time, transfer = posted.popleft()
            transfer.start = max(time, expected.popleft())
            event = partial(self._share_links, transfer) if transfer.ports else partial(self._finish, transfer, 0)
            self._at(transfer.start + transfer.latency, event)

    def _share_links(self, transfer: _Transfer, now: float) -> None:
        transfer.since = now
        self.changed.update(transfer.ports)
        for port in transfer.ports:
            self.on_port[port][id(transfer)] = transfer

    def _update_rates(self, now: float) -> None:
        """Give each transfer on the changed ports its new rate: the smallest of its even shares."""
        transfers = {key: transfer for port in self.changed for key, transfer in self.on_port[port].items()}
        self.changed.clear()
        for transfer in transfers.values():
            rate = min(self.capacity[port[0]] / len(self.on_port[port]) for port in transfer.ports)
            if rate != transfer.rate:
                transfer.remaining = max(0.0, transfer.remaining - transfer.rate * (now - transfer.since))
                transfer.since, transfer.rate, transfer.version = now, rate, transfer.version + 1
                self._at(now + transfer.remaining / rate, partial(self._finish, transfer, transfer.version))

    def _finish(self, transfer: _Transfer, version: int, now: float) -> None:
        if version != transfer.version:  # the rate has changed since this event was scheduled
            return
        self.changed.update(transfer.ports)
        for port in transfer.ports:
            del self.on_port[port][id(transfer)]
        if self.record and transfer.message.size:
            span = TimelineSpan("transfer", transfer.start, now, transfer.step, transfer.message.label)
            self.by_rank[transfer.source].spans.append(span)
        for rank in (transfer.source, transfer.to):
            state = self.by_rank[rank]
            state.transfers_done = max(state.transfers_done, now)
            state.pending -= 1
            if not state.pending:
                self._end_step(rank)

    def _end_step(self, rank: int) -> None:
        state = self.by_rank[rank]
        phase = self.phases[rank][state.step]
        busy = sum(item.seconds for item in phase.work)
        moving = state.transfers_done - state.begin
        if self.serial == 1.0:
            end = state.begin + moving + busy
        else:
            overhead = moving and self.cluster.step_overhead_s
            end = state.begin + max(overhead + busy * (1.0 - self.serial), moving) + busy * self.serial
        if self.record:
            self._record(state, phase, end, busy)
        state.computing += busy
        state.exposed += end - state.begin - busy
        state.hidden += max(0.0, moving + busy - (end - state.begin))
        self._at(end, partial(self._begin_step, rank))

    def _record(self, state: RankTimeline, phase: Phase, end: float, busy: float) -> None:
        at = begin = state.begin if self.serial < 1.0 else end - busy
        for item in phase.work:
            if item.seconds:
                state.spans.append(TimelineSpan("compute", at, at + item.seconds, state.step, item.label))
            at += item.seconds
        wait = (at, end) if self.serial < 1.0 else (state.begin, begin)
        if wait[1] > wait[0]:
            state.spans.append(TimelineSpan("wait", *wait, state.step))
