"""Event simulation of ranks that compute and exchange, step by step, on shared links. Plain Python, no torch.

A rank's step begins when its previous one has ended: its transfers are posted together, its blocks computed meanwhile,
and it ends when both are done, as in the executor. A transfer starts once both its ends have posted it, takes its
latency, and then shares links evenly with whatever else is on them: a rank's own link inside its node, and a node's one
link between nodes, each with a speed per direction.

Where all ranks do alike, shifted by rank, simulating `period` of them is enough: the others are copies. Rank r stands
for all ranks that are r modulo the period; what it sends to a copy's copy arrives at itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .cluster import Cluster
from .timeline import Phase, Sent, Timeline, TimelineSpan


def simulate(
    phases: Sequence[Sequence[Phase]], ranks: int, cluster: Cluster, *, overlap: bool = True, record: bool = False
) -> Timeline:
    """Runs each rank's phases on the cluster.

    Args:
        phases: of each simulated rank, 0 to the period; all of them (period = ranks) unless all ranks do alike.
        ranks: of the whole group; transfers name ranks of it.
        cluster: links, latencies, overheads.
        overlap: False computes a step's blocks after its transfers.
        record: keep the spans.

    Raises:
        ValueError: a period that does not divide the ranks, or transfers whose other end is never posted.
    """
    if not phases or ranks % len(phases):
        raise ValueError(f"simulate: {len(phases)} ranks cannot stand for {ranks}: it does not divide")
    return _Run(phases, ranks, cluster, overlap, record).run()


@dataclass(slots=True)
class _Flow:
    """A transfer between two simulated ranks."""

    source: int
    to: int
    size: int
    label: str
    step: int
    network: bool
    ports: tuple[tuple[str, int], ...]
    remaining: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    start: float = 0.0
    version: int = 0


@dataclass(slots=True)
class _Rank:
    step: int = -1
    begin: float = 0.0
    pending: int = 0
    transfers_done: float = 0.0
    end: float = 0.0
    computing: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    node_bytes: int = 0
    network_bytes: int = 0
    spans: list[TimelineSpan] = field(default_factory=list)


_BEGIN, _ACTIVE, _DONE = range(3)


class _Run:
    def __init__(
        self, phases: Sequence[Sequence[Phase]], ranks: int, cluster: Cluster, overlap: bool, record: bool
    ) -> None:
        self.phases, self.ranks, self.cluster, self.record = phases, ranks, cluster, record
        self.period = len(phases)
        # the part of a step's computation that its transfers have to wait for, where they do not run beside it
        self.serial = 1.0 - cluster.overlap if overlap else 1.0
        self.state = [_Rank() for _ in phases]
        self.events: list[tuple[float, int, int, object, int]] = []
        self.count = 0
        self.posted: defaultdict[tuple[int, int], deque[tuple[float, _Flow]]] = defaultdict(deque)
        self.expected: defaultdict[tuple[int, int], deque[float]] = defaultdict(deque)
        self.on_port: defaultdict[tuple[str, int], dict[int, _Flow]] = defaultdict(dict)
        self.capacity = {
            "out": cluster.node_link,
            "in": cluster.node_link,
            "card out": cluster.gpu_network_link,
            "card in": cluster.gpu_network_link,
            "node out": cluster.network_link,
            "node in": cluster.network_link,
        }

    def run(self) -> Timeline:
        for rank in range(self.period):
            self._push(0.0, _BEGIN, rank)
        while self.events:
            now = self.events[0][0]
            touched: set[tuple[str, int]] = set()
            while self.events and self.events[0][0] <= now * (1 + 1e-12):
                _, _, kind, what, version = heappop(self.events)
                if kind == _BEGIN:
                    assert isinstance(what, int)
                    self._begin(what, now)
                    continue
                assert isinstance(what, _Flow)
                if kind == _ACTIVE:
                    what.since = now
                    for port in what.ports:
                        self.on_port[port][id(what)] = what
                    touched.update(what.ports)
                elif version == what.version:
                    for port in what.ports:
                        del self.on_port[port][id(what)]
                    touched.update(what.ports)
                    self._finish(what, now)
            if touched:
                self._share(touched, now)
        stuck = [rank for rank, state in enumerate(self.state) if state.step < len(self.phases[rank])]
        if stuck:
            raise ValueError(f"simulate: rank {stuck[0]} waits for ever in step {self.state[stuck[0]].step}")
        return self._timeline()

    def _push(self, time: float, kind: int, what: object, version: int = 0) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, kind, what, version))

    def _begin(self, rank: int, now: float) -> None:
        state = self.state[rank]
        state.step += 1
        state.begin = state.end = state.transfers_done = now
        if state.step == len(self.phases[rank]):
            return
        phase = self.phases[rank][state.step]
        posted = now + (self.cluster.step_overhead_s if phase.sends or phase.sources else 0.0)
        state.pending = len(phase.sends) + len(phase.sources)
        for sent in phase.sends:
            self._post(rank, sent, posted)
        for source in phase.sources:
            self.expected[source % self.period, rank].append(posted)
            self._match(source % self.period, rank)
        if not state.pending:
            self._end_step(rank)

    def _post(self, rank: int, sent: Sent, now: float) -> None:
        to, network = sent.to % self.period, not self.cluster.same_node(rank, sent.to)
        ports: tuple[tuple[str, int], ...] = (("out", rank), ("in", to))
        if network:
            nodes = rank // self.cluster.gpus_per_node, to // self.cluster.gpus_per_node
            ports = (("card out", rank), ("card in", to), ("node out", nodes[0]), ("node in", nodes[1]))
            self.state[rank].network_bytes += sent.size
        else:
            self.state[rank].node_bytes += sent.size
        flow = _Flow(rank, to, sent.size, sent.label, self.state[rank].step, network, ports, float(sent.size))
        self.posted[rank, to].append((now, flow))
        self._match(rank, to)

    def _match(self, source: int, to: int) -> None:
        """Starts the next transfer between two ranks once both have posted it."""
        ours, theirs = self.posted[source, to], self.expected[source, to]
        if not ours or not theirs:
            return
        posted, flow = ours.popleft()
        flow.start = max(posted, theirs.popleft())
        latency = self.cluster.network_latency_s if flow.network else self.cluster.node_latency_s
        if flow.size:
            self._push(flow.start + latency, _ACTIVE, flow)
        else:  # empty pieces are not sent
            self._push(flow.start, _DONE, flow)
            flow.ports = ()

    def _share(self, touched: set[tuple[str, int]], now: float) -> None:
        """Gives each transfer on the touched links its new rate: the least of its even shares."""
        flows = {key: flow for port in touched for key, flow in self.on_port[port].items()}
        for flow in flows.values():
            rate = min(self.capacity[kind] / len(self.on_port[kind, where]) for kind, where in flow.ports)
            if rate == flow.rate:
                continue
            flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            flow.version += 1
            self._push(now + flow.remaining / rate, _DONE, flow, flow.version)

    def _finish(self, flow: _Flow, now: float) -> None:
        if self.record and flow.size:
            self.state[flow.source].spans.append(TimelineSpan("transfer", flow.start, now, flow.step, flow.label))
        for rank in (flow.source, flow.to):
            state = self.state[rank]
            state.transfers_done = max(state.transfers_done, now)
            state.pending -= 1
            if not state.pending:
                self._end_step(rank)

    def _end_step(self, rank: int) -> None:
        state = self.state[rank]
        phase = self.phases[rank][state.step]
        busy = sum(item.seconds for item in phase.work)
        moving = state.transfers_done - state.begin
        beside = busy * (1.0 - self.serial)  # of the computation, what runs beside the transfers
        if self.serial == 1.0:
            end = state.begin + moving + busy
        else:
            overhead = moving and self.cluster.step_overhead_s
            end = state.begin + max(overhead + beside, moving) + busy * self.serial
        if self.record:
            self._record(rank, phase, end, busy)
        state.computing += busy
        state.exposed += end - state.begin - busy
        state.hidden += max(0.0, moving + busy - (end - state.begin))
        self._push(end, _BEGIN, rank)

    def _record(self, rank: int, phase: Phase, end: float, busy: float) -> None:
        state = self.state[rank]
        at = state.begin if self.serial < 1.0 else end - busy
        if self.serial == 1.0 and end - busy > state.begin:
            state.spans.append(TimelineSpan("wait", state.begin, end - busy, state.step))
        for item in phase.work:
            if item.seconds:
                state.spans.append(TimelineSpan("compute", at, at + item.seconds, state.step, item.label))
            at += item.seconds
        if self.serial < 1.0 and end > at:
            state.spans.append(TimelineSpan("wait", at, end, state.step))

    def _timeline(self) -> Timeline:
        every = self.state
        return Timeline(
            ranks=self.ranks,
            period=self.period,
            end=tuple(state.end for state in every),
            computing=tuple(state.computing for state in every),
            exposed=tuple(state.exposed for state in every),
            hidden=tuple(state.hidden for state in every),
            node_bytes=tuple(state.node_bytes for state in every),
            network_bytes=tuple(state.network_bytes for state in every),
            spans=tuple(tuple(sorted(state.spans, key=lambda span: (span.start, span.end))) for state in every),
        )
