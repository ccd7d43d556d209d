"""The order of ranks in a schedule on several nodes.

A schedule numbers its ranks by position: neighbours in a ring are neighbouring positions, and the Q group of a mesh is
a run of positions. `rank_order` chooses the rank at each position by node, whatever numbers the launcher gave, and
`renumbered` puts these ranks into a schedule. Only the partners of a rank change: rank r keeps its own query rows and
keys, so what a caller passes on each rank does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from .mesh import MeshShape
from .steps import Schedule, Step

RankOrder = tuple[int, ...]
"""The rank at each position."""


def by_node(nodes: Sequence[int]) -> RankOrder:
    """Return the ranks node by node. A ring in this order has one link into each node and one out of it.

    Args:
        nodes: the node of each rank.
    """
    return tuple(sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank)))


@lru_cache(maxsize=256)
def rank_order(
    nodes: Sequence[int], mesh_shape: MeshShape, q_bytes: float = 0.0, kv_bytes: float = 0.0
) -> RankOrder | None:
    """Return the order of the ranks for a mesh shape, or None if it is 0, 1, 2, ...

    The ranks of a node have consecutive positions in the Q groups or, if a node then sends fewer bytes to other nodes,
    in the KV groups.

    Args:
        nodes: the node of each rank.
        mesh_shape: (a, b) with a b ranks.
        q_bytes, kv_bytes: bytes that a rank sends in its Q group and in its KV group.
    """
    a, b = mesh_shape
    order = by_node(nodes)
    if a > 1 and b > 1:
        kv_first = tuple(order[p % a * b + p // a] for p in range(a * b))
        order = min(order, kv_first, key=lambda x: max(sent_by_node(x, nodes, mesh_shape, q_bytes, kv_bytes).values()))
    return None if order == tuple(range(len(order))) else order


def sent_by_node(
    order: Sequence[int], nodes: Sequence[int], mesh_shape: MeshShape, q_bytes: float, kv_bytes: float
) -> dict[int, float]:
    """Return the bytes that each node sends to other nodes in the rings of a mesh; arguments as in `rank_order`."""
    a, size = mesh_shape[0], len(order)
    total = dict.fromkeys(nodes, 0.0)
    for position, rank in enumerate(order):
        q_next, kv_next = position - position % a + (position + 1) % a, (position + a) % size
        for following, count in ((q_next, q_bytes), (kv_next, kv_bytes)):
            if nodes[order[following]] != nodes[rank]:
                total[nodes[rank]] += count
    return total


def renumbered(schedule: Schedule, order: RankOrder) -> Schedule:
    """Return the schedule of a position with the rank at each position in the place of its number."""
    return tuple(
        Step(
            tuple(
                replace(
                    t,
                    send_shard=order[t.send_shard],
                    dst=order[t.dst],
                    recv_shard=order[t.recv_shard],
                    src=order[t.src],
                )
                for t in step.transfers
            ),
            tuple(replace(b, q_shard=order[b.q_shard], kv_shard=order[b.kv_shard]) for b in step.blocks),
        )
        for step in schedule
    )
