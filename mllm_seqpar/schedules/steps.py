"""Schedules as data: the attention blocks that a rank computes at each step, and the transfers that run meanwhile.

An attention block is attend(Q_i, KV_j): rank i owns the Q shard, rank j owns the KV shard. A schedule is a list of
steps. The executor posts the transfers of a step as one grouped exchange, computes the blocks of the step, and then
waits for the transfers. Input transfers send the inputs of later blocks. Result transfers send partial results to the
owner of the shard; each rank that they pass merges its own partial result into the one that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["q", "kv"]
TransferKind = Literal["input", "result"]


@dataclass(frozen=True)
class Transfer:
    """Send a shard, or the partial result for it, to rank `dst`, and receive that of another shard from rank `src`.

    `send_shard` and `recv_shard` are the ranks that own the two shards.
    """

    kind: TransferKind
    axis: Axis
    send_shard: int
    dst: int
    recv_shard: int
    src: int


@dataclass(frozen=True)
class AttentionBlock:
    """attend(Q_i, KV_j), i = `q_shard`, j = `kv_shard`, or only its query rows from part/parts to (part + 1)/parts."""

    q_shard: int
    kv_shard: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Step:
    """The transfers to post, and the blocks to compute before the step waits for them."""

    transfers: tuple[Transfer, ...]
    blocks: tuple[AttentionBlock, ...]


Schedule = tuple[Step, ...]


def last_uses(schedule: Schedule) -> dict[tuple[Axis, int], int]:
    """Return by (axis, owner) of each shard the last step that computes with it or sends it."""
    uses: dict[tuple[Axis, int], int] = {}
    for index, step in enumerate(schedule):
        for block in step.blocks:
            uses["q", block.q_shard] = uses["kv", block.kv_shard] = index
        for transfer in step.transfers:
            if transfer.kind == "input":
                uses[transfer.axis, transfer.send_shard] = index
    return uses
