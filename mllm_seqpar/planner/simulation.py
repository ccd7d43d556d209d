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
from itertools import count
from typing import NamedTuple

from .cluster import Cluster


class Phase(NamedTuple):
    """One step of one rank. Between two ranks, transfers match in the order of posting."""

    seconds: float = 0.0  # the time that its blocks take
    sends: tuple[tuple[int, int], ...] = ()  # (to, bytes) of each transfer that it posts
    sources: tuple[int, ...] = ()  # the rank that sends, for each transfer that arrives


@dataclass(slots=True)
class RankTimeline:
    """What one rank does until it ends after `seconds`."""

    seconds: float = 0.0
    exposed: float = 0.0  # it waits
    hidden: float = 0.0  # it computes while its step's transfers are in flight
    node_bytes: int = 0
    network_bytes: int = 0
    # (kind, start, end) of what it does: "compute", "wait", and "transfer" of what it sends
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    # During the simulation: the step, when it began, its transfers that have not ended, and when the last one ended.
    step: int = field(default=-1, repr=False)
    begin: float = field(default=0.0, repr=False)
    pending: int = field(default=0, repr=False)
    transfers_done: float = field(default=0.0, repr=False)


_Port = tuple[str, int]
"""One direction of a link: its kind (see `capacity` in `simulate`), and the rank or node that it belongs to."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer between two simulated ranks; `remaining` bytes at time `since`, moving at `rate`."""

    source: int
    to: int
    ports: tuple[_Port, ...]
    latency: float
    remaining: float
    since: float
    start: float = 0.0
    rate: float = 0.0
    version: int = 0


def simulate(phases: Sequence[Sequence[Phase]], ranks: int, cluster: Cluster) -> Sequence[RankTimeline]:
    """Return the timelines of the simulated ranks on the cluster.

    `phases` has the phases of all ranks, or of a period of ranks that represents the others; `ranks` is the size of the
    whole group, whose ranks transfers name. A transfer that is never posted at its other end raises ValueError.
    """
    if not phases or ranks % len(phases):
        raise ValueError(f"simulate: {len(phases)} simulated ranks do not divide {ranks} ranks")
    period, node = len(phases), cluster.gpus_per_node
    serial = 1.0 - cluster.overlap  # of a step's computation, beside which no transfer can run
    rates = {"": cluster.node_link, "card ": cluster.gpu_network_link, "node ": cluster.network_link}
    capacity = {f"{link}{way}": rate for link, rate in rates.items() for way in ("out", "in")}
    timelines = [RankTimeline() for _ in phases]
    events: list[tuple[float, int, Callable[[float], None]]] = []
    numbers = count()
    posted: defaultdict[tuple[int, int], deque[_Transfer]] = defaultdict(deque)
    expected: defaultdict[tuple[int, int], deque[float]] = defaultdict(deque)
    on_port: defaultdict[_Port, dict[_Transfer, None]] = defaultdict(dict)  # in the order of their starts
    changed: dict[_Port, None] = {}

    def at(time: float, event: Callable[[float], None]) -> None:
        heappush(events, (time, next(numbers), event))

    def begin_step(rank: int, now: float) -> None:
        state = timelines[rank]
        state.step += 1
        state.begin = state.seconds = state.transfers_done = now
        if state.step == len(phases[rank]):
            return
        _, sends, sources = phases[rank][state.step]
        state.pending = len(sends) + len(sources)
        now += cluster.step_overhead_s if state.pending else 0.0
        for peer, size in sends:
            to = peer % period
            if rank // node == peer // node:
                ports: tuple[_Port, ...] = (("out", rank), ("in", to))
                latency, state.node_bytes = cluster.node_latency_s, state.node_bytes + size
            else:
                ports = (("card out", rank), ("card in", to), ("node out", rank // node), ("node in", to // node))
                latency, state.network_bytes = cluster.network_latency_s, state.network_bytes + size
            if not size:  # empty shards are not sent
                ports, latency = (), 0.0
            posted[rank, to].append(_Transfer(rank, to, ports, latency, float(size), since=now))
            match(rank, to)
        for source in sources:
            expected[source % period, rank].append(now)
            match(source % period, rank)
        if not state.pending:
            end_step(rank)

    def match(source: int, to: int) -> None:
        """Start the next transfer between two ranks once both have posted it."""
        if posted[source, to] and expected[source, to]:
            transfer = posted[source, to].popleft()
            transfer.start = max(transfer.since, expected[source, to].popleft())
            event = partial(share_links, transfer) if transfer.ports else partial(finish, transfer, 0)
            at(transfer.start + transfer.latency, event)

    def share_links(transfer: _Transfer, now: float) -> None:
        transfer.since = now
        for port in transfer.ports:
            changed[port] = on_port[port][transfer] = None

    def update_rates(now: float) -> None:
        """Give each transfer on the changed ports its new rate: the smallest of its even shares."""
        transfers = {transfer: None for port in changed for transfer in on_port[port]}
        changed.clear()
        for transfer in transfers:
            rate = min(capacity[port[0]] / len(on_port[port]) for port in transfer.ports)
            if rate != transfer.rate:
                transfer.remaining = max(0.0, transfer.remaining - transfer.rate * (now - transfer.since))
                transfer.since, transfer.rate, transfer.version = now, rate, transfer.version + 1
                at(now + transfer.remaining / rate, partial(finish, transfer, transfer.version))

    def finish(transfer: _Transfer, version: int, now: float) -> None:
        if version != transfer.version:  # the rate has changed since this event was scheduled
            return
        for port in transfer.ports:
            changed[port] = None
            del on_port[port][transfer]
        if transfer.ports:
            timelines[transfer.source].spans.append(("transfer", transfer.start, now))
        for rank in (transfer.source, transfer.to):
            state = timelines[rank]
            state.transfers_done = max(state.transfers_done, now)
            state.pending -= 1
            if not state.pending:
                end_step(rank)

    def end_step(rank: int) -> None:
        state = timelines[rank]
        busy, moving = phases[rank][state.step].seconds, state.transfers_done - state.begin
        overhead = moving and cluster.step_overhead_s
        end = state.begin + max(overhead + busy * (1.0 - serial), moving) + busy * serial
        first = state.begin if serial < 1.0 else end - busy
        spans = ("wait", state.begin, first), ("compute", first, first + busy), ("wait", first + busy, end)
        state.spans += [span for span in spans if span[2] > span[1]]
        state.exposed += end - state.begin - busy
        state.hidden += max(0.0, moving + busy - (end - state.begin))
        at(end, partial(begin_step, rank))

    for rank in range(period):
        at(0.0, partial(begin_step, rank))
    while events:
        now = events[0][0]
        while events and events[0][0] <= now * (1 + 1e-12):
            heappop(events)[2](now)
        if changed:
            update_rates(now)
    for rank, state in enumerate(timelines):
        if state.step < len(phases[rank]):
            raise ValueError(f"simulate: rank {rank} waits forever in step {state.step}")
    return timelines
