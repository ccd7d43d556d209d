"""What one block of a call takes, what one move of its schedule sends, and how many blocks hide a move."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from mllm_seqpar.schedules import Axis, OverlapRatios, Transfer, TransferKind
from mllm_seqpar.schedules.bytes_sent import LSE_BYTES, Problem

from .candidates import problem_within_groups
from .cluster import Cluster
from .transfers import Hop, column_hop, row_hop


def block_seconds(problem: Problem, cluster: Cluster, keys: int, *, backward: bool, visible: float = 1.0) -> float:
    """Time of one block: all rows of a rank against `keys` keys. Blocks without visible entries cost nothing."""
    entries = problem.batch * problem.rows * keys * visible
    if not entries:
        return 0.0
    flops, rate = (10, cluster.attention_backward) if backward else (4, cluster.attention_forward)
    return flops * entries * problem.heads * problem.dim / rate + cluster.block_overhead_s


def move_bytes(
    problem: Problem, move: Transfer, *, backward: bool, owner: int, seen: Sequence[Sequence[int]] | None = None
) -> int:
    """Bytes that one rank sends for one move of its schedule; sums over a schedule equal `schedules.traffic`.

    Args:
        problem: the call.
        move: the move.
        backward: which direction.
        owner: the sending rank: with `seen`, who sees what of whom decides how many rows go.
        seen: as for `lv_xattn_bytes`.
    """
    if move.axis == "kv":
        width = 2 * problem.key_batch * problem.kv_heads * problem.dim * problem.keys[move.send_shard]
        return width * (problem.element if move.kind == "input" else problem.accumulated)
    rows = problem.batch * problem.rows
    if seen is not None:
        row, column = (move.send_shard, move.dst) if move.kind == "input" else (move.send_shard, owner)
        rows = problem.key_batch * seen[row][column]
    rows *= problem.heads
    if move.kind == "input":
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
) -> OverlapRatios:
    """How many blocks of computation hide one transfer of each kind: what a mesh's order of steps is worked out for.

    Rounded to two digits: more would only make as many orders as there are lengths.
    """
    inner = problem_within_groups(problem, heads_over)
    keys = ceil(sum(inner.keys) / len(inner.keys))
    block = block_seconds(inner, cluster, keys, backward=backward, visible=visible)
    rows = row_hop(cluster, problem.ranks, heads_over, tile)
    columns = column_hop(cluster, problem.ranks, heads_over, tile)

    def blocks(axis: Axis, stream: TransferKind, hop: Hop) -> float:
        size = move_bytes(inner, Transfer(stream, axis, 0, 0, 0, 0), backward=backward, owner=0)
        seconds = hop.latency + size / hop.rate + cluster.step_overhead_s
        return float(f"{seconds / block:.2g}") if block else 1.0

    return OverlapRatios(
        q=blocks("q", "input", rows),
        kv=blocks("kv", "input", columns),
        o=blocks("q", "result", rows),
        dkv=blocks("kv", "result", columns),
        one_link=rows.network == columns.network,
    )
