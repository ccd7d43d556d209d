"""What one attention call takes on a cluster: its schedules simulated, with the bytes and FLOPs of the formulas.

Attention counts 4 FLOPs forward and 10 backward (scores are computed again) per query row, visible key, head and
channel. Where keys are projected from visual features, K and V cost 4 d_vis G D FLOPs a key; backward twice that for
the gradients, and once more to compute them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from ..schedules import Axis, Block, Hides, Move, Schedule, Stream, schedule_for
from ..schedules.heads import HeadShares
from ..schedules.traffic import LSE_BYTES, Problem
from .cluster import Cluster
from .simulate import Computed, Phase, Sent, Timeline, simulate
from .strategies import Way, period_of, within_groups
from .transfers import Hop, all_gather_seconds, all_to_all, column_hop, row_hop

Entries = float | Sequence[Sequence[float]]
"""Share of visible entries: of every block, or [i][j] of block (i, j)."""


@dataclass(frozen=True, kw_only=True)
class Visual:
    """Where the keys of a cross-attention come from.

    Attributes:
        dim: channels of the visual features y that K and V are projected from.
        layers: cross-attention layers of the model; what is done once for all of them is shared out.
        recompute: backward projects K and V again instead of keeping them.
        trained: the features need a gradient (vision tower or projector are trained).
    """

    dim: int
    layers: int = 1
    recompute: bool = True
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class CallCost:
    """One call, one direction; seconds of the slowest rank, bytes that the busiest rank sends.

    Attributes:
        seconds: from start to the last rank's end, projections included.
        attention: computing blocks.
        projection: projecting features to K and V, and its gradients.
        exposed: neither computing nor done: transfers that nothing hides, and waiting for others.
        hidden: transfers under computation.
        node_bytes, network_bytes: sent inside the node and to other nodes.
        timeline: the simulated ranks.
    """

    seconds: float
    attention: float
    projection: float
    exposed: float
    hidden: float
    node_bytes: int
    network_bytes: int
    timeline: Timeline


def call_cost(
    problem: Problem,
    way: Way,
    cluster: Cluster,
    *,
    backward: bool,
    visible: Entries = 1.0,
    seen: Sequence[Sequence[int]] | None = None,
    visual: Visual | None = None,
    overlap: bool = True,
    record: bool = False,
) -> CallCost:
    """The cost of one call, one direction.

    Args:
        problem: rows, keys, heads and so on; `rank` plays no part.
        way: strategy and tile, see `ways`.
        cluster: rates and links.
        backward: which direction.
        visible: share of visible entries, of every block or per block (0.5 for balanced causal layouts).
        seen: as for `lv_xattn_bytes`: rows travel straight, and only where they see something. LV-XAttn only.
        visual: where the keys come from, if they are projected from visual features.
        overlap: False waits for transfers before computing.
        record: keep the spans of the timeline.
    """
    inner = within_groups(problem, way.heads_over)
    entries = _grouped(visible, way.heads_over)
    copies = 1
    if way.strategy == "replicate":  # every rank computes its rows against all keys, which it projects itself
        copies = problem.ranks
        inner = replace(inner, keys=(sum(problem.keys),) * problem.ranks)
    even = len(set(problem.keys)) == 1 and isinstance(visible, float | int) and seen is None
    period = period_of(way, problem.ranks, cluster) if even else problem.ranks
    hides = blocks_to_hide(
        problem, way.tile, cluster, backward=backward, heads_over=way.heads_over, visible=_mean(visible)
    )
    phases = [_phases(problem, inner, way, rank, cluster, backward, entries, seen, hides) for rank in range(period)]
    timeline = simulate(phases, problem.ranks, cluster, overlap=overlap, record=record)
    around = _around(problem, way, cluster, backward, visual)
    projection = copies * _projection_seconds(problem, cluster, visual, backward)
    return CallCost(
        seconds=timeline.seconds + around.seconds + projection,
        attention=max(timeline.computing),
        projection=projection,
        exposed=max(timeline.exposed) + around.seconds,
        hidden=max(timeline.hidden),
        node_bytes=max(timeline.node_bytes) + around.node_bytes,
        network_bytes=max(timeline.network_bytes) + around.network_bytes,
        timeline=timeline,
    )


def block_seconds(problem: Problem, cluster: Cluster, keys: int, *, backward: bool, visible: float = 1.0) -> float:
    """Time of one block: all rows of a rank against `keys` keys. Blocks without visible entries cost nothing."""
    entries = problem.batch * problem.rows * keys * visible
    if not entries:
        return 0.0
    flops, rate = (10, cluster.attention_backward) if backward else (4, cluster.attention_forward)
    return flops * entries * problem.heads * problem.dim / rate + cluster.block_overhead_s


def move_bytes(
    problem: Problem, move: Move, *, backward: bool, owner: int, seen: Sequence[Sequence[int]] | None = None
) -> int:
    """Bytes that one rank sends for one move of its schedule; sums over a schedule equal `schedules.traffic`.

    Args:
        problem: the call.
        move: the move.
        backward: which direction.
        owner: the sending rank: with `seen`, who sees what of whom decides how many rows go.
        seen: as for `lv_xattn_bytes`.
    """
    if move.axis == "columns":
        width = 2 * problem.key_batch * problem.kv_heads * problem.dim * problem.keys[move.send]
        return width * (problem.element if move.stream == "ahead" else problem.accumulated)
    rows = problem.batch * problem.rows
    if seen is not None:
        row, column = (move.send, move.to) if move.stream == "ahead" else (move.send, owner)
        rows = problem.key_batch * seen[row][column]
    rows *= problem.heads
    if move.stream == "ahead":
        per_row = 3 * problem.dim * problem.element + LSE_BYTES if backward else problem.dim * problem.element
    else:
        per_row = problem.dim * problem.accumulated + (0 if backward else LSE_BYTES)
    return rows * per_row


def blocks_to_hide(
    problem: Problem,
    tile: tuple[int, int],
    cluster: Cluster,
    *,
    backward: bool,
    heads_over: int = 1,
    visible: float = 1.0,
) -> Hides:
    """How many blocks of computation hide one transfer of each kind: what a mesh's order of steps is worked out for.

    Rounded to two digits: more would only make as many orders as there are lengths.
    """
    inner = within_groups(problem, heads_over)
    keys = ceil(sum(inner.keys) / len(inner.keys))
    block = block_seconds(inner, cluster, keys, backward=backward, visible=visible)
    rows = row_hop(cluster, problem.ranks, heads_over, tile)
    columns = column_hop(cluster, problem.ranks, heads_over, tile)

    def blocks(axis: Axis, stream: Stream, hop: Hop) -> float:
        size = move_bytes(inner, Move(stream, axis, 0, 0, 0, 0), backward=backward, owner=0)
        seconds = hop.latency + size / hop.rate + cluster.step_overhead_s
        return float(f"{seconds / block:.2g}") if block else 1.0

    return Hides(
        q=blocks("rows", "ahead", rows),
        kv=blocks("columns", "ahead", columns),
        o=blocks("rows", "behind", rows),
        dkv=blocks("columns", "behind", columns),
        one_link=rows.network == columns.network,
    )


def _phases(
    problem: Problem,
    inner: Problem,
    way: Way,
    rank: int,
    cluster: Cluster,
    backward: bool,
    visible: Entries,
    seen: Sequence[Sequence[int]] | None,
    hides: Hides,
) -> list[Phase]:
    """A rank's schedule as phases: moves with their bytes, between real ranks; blocks with their seconds."""
    group, member = divmod(rank, way.heads_over)
    schedule: Schedule
    if way.strategy == "replicate":
        schedule = schedule_for((1, 1), 0, backward=backward)
    else:
        schedule = schedule_for(way.tile, group, backward=backward, straight=seen is not None, hides=hides)

    def real(other: int) -> int:
        return other * way.heads_over + member

    def computed(block: Block) -> Computed:
        share = visible if isinstance(visible, float | int) else visible[block.row][block.column]
        seconds = block_seconds(inner, cluster, inner.keys[block.column], backward=backward, visible=share)
        return Computed(seconds / block.parts, f"{block.row},{block.column}")

    def sent(move: Move) -> Sent:
        size = move_bytes(inner, move, backward=backward, owner=group, seen=seen)
        return Sent(real(move.to), size, f"{_NAMES[move.stream, move.axis, backward]}{move.send}")

    return [
        Phase(
            tuple(sent(move) for move in step.moves),
            tuple(real(move.source) for move in step.moves),
            tuple(computed(block) for block in step.blocks),
        )
        for step in schedule
    ]


_NAMES = {
    ("ahead", "rows", False): "Q",
    ("behind", "rows", False): "O",
    ("ahead", "columns", False): "KV",
    ("ahead", "rows", True): "Q,dO",
    ("behind", "rows", True): "dQ",
    ("ahead", "columns", True): "KV",
    ("behind", "columns", True): "dKV",
}


def _grouped(visible: Entries, group: int) -> Entries:
    """Shares of the blocks of groups of ranks: the mean over their members."""
    if isinstance(visible, float | int) or group == 1:
        return visible
    size = len(visible) // group
    return [
        [
            sum(visible[i * group + x][j * group + y] for x in range(group) for y in range(group)) / group**2
            for j in range(size)
        ]
        for i in range(size)
    ]


def _mean(visible: Entries) -> float:
    if isinstance(visible, float | int):
        return visible
    return sum(map(sum, visible)) / sum(map(len, visible))


@dataclass(frozen=True)
class _Around:
    """What happens before and after the schedule, hidden by nothing."""

    seconds: float = 0.0
    node_bytes: int = 0
    network_bytes: int = 0


def _around(problem: Problem, way: Way, cluster: Cluster, backward: bool, visual: Visual | None) -> _Around:
    if way.strategy == "replicate" and problem.ranks > 1:
        return _replication(problem, cluster, backward, visual)
    if way.heads_over == 1:
        return _Around()
    shares = HeadShares(problem.heads, problem.kv_heads, way.heads_over)
    kv_heads = sum(len(shares.key_heads(place)) for place in range(way.heads_over))
    q = problem.batch * problem.rows * problem.heads * problem.dim * problem.element
    kv = 2 * problem.key_batch * max(problem.keys) * kv_heads * problem.dim * problem.element
    if backward:  # dO to heads, and K and V where they are made again; dQ, dK, dV back to rows and keys
        partial = kv_heads > problem.kv_heads  # ranks that share a key head have a part of its gradient each
        kv_gradients = kv // problem.element * problem.accumulated if partial else kv
        sizes = (q + (kv if visual is not None and visual.recompute else 0), q + kv_gradients)
    else:  # Q, K, V to heads; O and the log-sum-exp back to rows
        sizes = (q + kv, q + problem.batch * problem.rows * problem.heads * LSE_BYTES)
    trips = [all_to_all(cluster, problem.ranks, way.heads_over, size) for size in sizes]
    return _Around(*(sum(part) for part in zip(*trips, strict=True)))


def _replication(problem: Problem, cluster: Cluster, backward: bool, visual: Visual | None) -> _Around:
    """Features gathered once per step (forward) and their gradients summed (backward): each layer bears its share.

    Without features, keys and values themselves are gathered, by every layer.
    """
    if visual is None:
        size = 2 * problem.key_batch * max(problem.keys) * problem.kv_heads * problem.dim
        layers = 1
    else:
        size, layers = problem.key_batch * max(problem.keys) * visual.dim, visual.layers
        if backward and not visual.trained:
            return _Around()
    size *= problem.accumulated if backward else problem.element
    gathered = all_gather_seconds(cluster, problem.ranks, size)
    inside = min(problem.ranks, cluster.gpus_per_node) - 1
    outside = problem.ranks - 1 - inside
    return _Around(gathered / layers, size * inside // layers, size * outside // layers)


def _projection_seconds(problem: Problem, cluster: Cluster, visual: Visual | None, backward: bool) -> float:
    if visual is None:
        return 0.0
    once = 4 * problem.key_batch * max(problem.keys) * visual.dim * problem.kv_heads * problem.dim / cluster.matmul
    if not backward:
        return once
    gradients = 2 if visual.trained else 1  # of weights, and of features
    return once * (gradients + visual.recompute)
