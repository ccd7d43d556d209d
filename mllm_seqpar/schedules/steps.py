"""Schedules as data: the attention blocks that a rank computes at each step, and the transfers that run meanwhile.

An attention block is attend(Q_i, KV_j): rank i owns the Q shard, rank j owns the KV shard. A schedule is a list of
steps. The executor posts the transfers of a step as one grouped exchange, computes the blocks of the step, and then
waits for the transfers. Input transfers send the inputs of later blocks. Result transfers send partial results to the
owner of the shard; each rank that they pass merges its own partial result into the one that it receives.

A schedule depends only on the number of ranks and contains no tensors. `CallSpec.steps` copies its steps for one
attention call and sets the fields that depend on the call: the rows of each transfer, which may be index tensors, and
the mask layers of each block with their kernels. These fields have the type Any, so that this package does not
import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Axis = Literal["q", "kv"]
TransferKind = Literal["input", "result"]


@dataclass(frozen=True)
class Transfer:
    """Send a shard, or its partial result, to rank `dst`, and receive another shard or its result from rank `src`.

    Attributes:
        kind: whether a shard is sent for later blocks, or results return to the owner of the shard.
        axis: the axis of the shards.
        send_shard, recv_shard: the ranks that own the two shards.
        send_rows: set for a call: the rows of the input shard to send (a slice or an index tensor); None: all.
        recv_rows: set for a call: the rows of this rank's shard that received results belong to; None: all.
        recv_length: set for a call: the number of rows or keys received.
        dtype: set for a call: the dtype in which results are sent.
    """

    kind: TransferKind
    axis: Axis
    send_shard: int
    dst: int
    recv_shard: int
    src: int
    send_rows: Any = None
    recv_rows: Any = None
    recv_length: int = 0
    dtype: Any = None


@dataclass(frozen=True)
class AttentionBlock:
    """attend(Q_i, KV_j), i = `q_shard`, j = `kv_shard`, or only its query rows from part/parts to (part + 1)/parts.

    `layers`, the layers of its mask with their kernels, are set for a call.
    """

    q_shard: int
    kv_shard: int
    part: int = 0
    parts: int = 1
    layers: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Step:
    """The transfers to post, the blocks to compute before the step waits for them, and what no later step uses.

    `released` names the received shards, by (axis, owner), that no later step computes with or sends.
    """

    transfers: tuple[Transfer, ...]
    blocks: tuple[AttentionBlock, ...]
    released: tuple[tuple[Axis, int], ...] = ()


Schedule = tuple[Step, ...]


def with_releases(schedule: Schedule, rank: int) -> Schedule:
    """Return the schedule of `rank` with the shards that each step releases; its own are never released."""
    uses: dict[tuple[Axis, int], int] = {}
    for index, step in enumerate(schedule):
        for block in step.blocks:
            uses["q", block.q_shard] = uses["kv", block.kv_shard] = index
        for transfer in step.transfers:
            if transfer.kind == "input":
                uses[transfer.axis, transfer.send_shard] = index
    released: list[list[tuple[Axis, int]]] = [[] for _ in schedule]
    for shard, last in uses.items():
        if shard[1] != rank:
            released[last].append(shard)
    return tuple(Step(s.transfers, s.blocks, tuple(r)) for s, r in zip(schedule, released, strict=True))
