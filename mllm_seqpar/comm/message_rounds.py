"""Division of one exchange into rounds that are launched one after the other.

NCCL can hang if one group has more than 256 sends and receives. It distributes them over several kernels, and a send
can be in an earlier kernel than its receive (pytorch/pytorch issue 174288). An exchange is therefore launched in
rounds. The sender and the receiver place a message in the same round without communication: the round follows from the
distance of the two ranks, the same in both directions, and from how many messages precede it between the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .base import Recv, Send

MESSAGES_PER_PAIR = 8
"""The number of messages between two ranks that always fit in a round, so that a ring step is not divided."""


def message_rounds(
    rank: int, size: int, sends: Sequence[Send], recvs: Sequence[Recv], limit: int | None
) -> Iterator[tuple[list[Send], list[Recv]]]:
    """Yield the sends and receives of each round in which this rank has any.

    Args:
        rank, size: of this rank and its group.
        sends, recvs: of the exchange. Messages between two ranks stay in their order.
        limit: the largest number of sends plus receives of a rank in one round, at least 4. None: one round.
    """
    if limit is None:
        if sends or recvs:
            yield list(sends), list(recvs)
        return
    # A rank sends to two peers at each distance, and receives from them: four times the messages of a pair.
    per_pair = max(min(MESSAGES_PER_PAIR, limit // 4), limit // (4 * max(1, size // 2)))
    distances = limit // (4 * per_pair)

    def numbered(peers: Sequence[int]) -> Iterator[tuple[int, int]]:
        earlier: Counter[int] = Counter()
        for peer in peers:
            distance = min((peer - rank) % size, (rank - peer) % size)
            yield earlier[peer] // per_pair, (distance - 1) // distances
            earlier[peer] += 1

    rounds: dict[tuple[int, int], tuple[list[Send], list[Recv]]] = {}
    for number, send in zip(numbered([s.peer for s in sends]), sends, strict=True):
        rounds.setdefault(number, ([], []))[0].append(send)
    for number, recv in zip(numbered([r.peer for r in recvs]), recvs, strict=True):
        rounds.setdefault(number, ([], []))[1].append(recv)
    for number in sorted(rounds):
        yield rounds[number]
