"""What one attention call takes on a cluster: its schedules simulated, with the bytes and FLOPs of the formulas.

Attention counts 4 FLOPs forward and 10 backward (scores are computed again) per query row, visible key, head and
channel. Where keys are projected from visual features, K and V cost 4 d_vis G D FLOPs a key; backward twice that for
the gradients, and once more to compute them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mllm_seqpar.schedules import AttentionBlock, OverlapRatios, Schedule, Transfer, schedule_for
from mllm_seqpar.schedules.bytes_sent import Problem

from .block_cost import block_seconds, blocks_to_hide, move_bytes
from .call_overheads import Visual, call_overheads, projection_seconds
from .candidates import ParallelSpec, period_of, problem_within_groups
from .cluster import Cluster
from .simulate import simulate
from .timeline import Computed, Phase, Sent, Timeline

Entries = float | Sequence[Sequence[float]]
"""Share of visible entries: of every block, or [i][j] of block (i, j)."""


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
    way: ParallelSpec,
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
        seen: as for `lv_xattn_bytes`: rows travel direct, and only where they see something. LV-XAttn only.
        visual: where the keys come from, if they are projected from visual features.
        overlap: False waits for transfers before computing.
        record: keep the spans of the timeline.
    """
    inner = problem_within_groups(problem, way.heads_over)
    entries = _grouped(visible, way.heads_over)
    copies = 1
    if way.strategy == "replicate":  # every rank computes its rows against all keys, which it projects itself
        copies = problem.ranks
        inner = replace(inner, keys=(sum(problem.keys),) * problem.ranks)
    even = len(set(problem.keys)) == 1 and isinstance(visible, float | int) and seen is None
    period = period_of(way, problem.ranks, cluster) if even else problem.ranks
    overlap_ratios = blocks_to_hide(
        problem, way.tile, cluster, backward=backward, heads_over=way.heads_over, visible=_mean(visible)
    )
    phases = [
        _phases(problem, inner, way, rank, cluster, backward, entries, seen, overlap_ratios) for rank in range(period)
    ]
    timeline = simulate(phases, problem.ranks, cluster, overlap=overlap, record=record)
    beside = call_overheads(problem, way, cluster, backward, visual)
    projection = copies * projection_seconds(problem, cluster, visual, backward)
    return CallCost(
        seconds=timeline.seconds + beside.seconds + projection,
        attention=max(timeline.computing),
        projection=projection,
        exposed=max(timeline.exposed) + beside.seconds,
        hidden=max(timeline.hidden),
        node_bytes=max(timeline.node_bytes) + beside.node_bytes,
        network_bytes=max(timeline.network_bytes) + beside.network_bytes,
        timeline=timeline,
    )


def _phases(
    problem: Problem,
    inner: Problem,
    way: ParallelSpec,
    rank: int,
    cluster: Cluster,
    backward: bool,
    visible: Entries,
    seen: Sequence[Sequence[int]] | None,
    overlap_ratios: OverlapRatios,
) -> list[Phase]:
    """A rank's schedule as phases: moves with their bytes, between real ranks; blocks with their seconds."""
    group, member = divmod(rank, way.heads_over)
    schedule: Schedule
    if way.strategy == "replicate":
        schedule = schedule_for((1, 1), 0, backward=backward)
    else:
        schedule = schedule_for(
            way.tile, group, backward=backward, direct=seen is not None, overlap_ratios=overlap_ratios
        )

    def real(other: int) -> int:
        return other * way.heads_over + member

    def computed(block: AttentionBlock) -> Computed:
        share = visible if isinstance(visible, float | int) else visible[block.q_shard][block.kv_shard]
        seconds = block_seconds(inner, cluster, inner.keys[block.kv_shard], backward=backward, visible=share)
        return Computed(seconds / block.parts, f"{block.q_shard},{block.kv_shard}")

    def sent(move: Transfer) -> Sent:
        size = move_bytes(inner, move, backward=backward, owner=group, seen=seen)
        return Sent(real(move.dst), size, f"{_NAMES[move.kind, move.axis, backward]}{move.send_shard}")

    return [
        Phase(
            tuple(sent(move) for move in step.transfers),
            tuple(real(move.src) for move in step.transfers),
            tuple(computed(block) for block in step.blocks),
        )
        for step in schedule
    ]


_NAMES = {
    ("input", "q", False): "Q",
    ("result", "q", False): "O",
    ("input", "kv", False): "KV",
    ("input", "q", True): "Q,dO",
    ("result", "q", True): "dQ",
    ("input", "kv", True): "KV",
    ("result", "kv", True): "dKV",
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
