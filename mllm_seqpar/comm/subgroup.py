"""Some ranks of a group as a group of their own, over the group's own transport: no further process group is made."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from .base import Communicator, Pending, Recv, Send
from .exchange_collectives import ExchangeCollectives


class Subgroup(ExchangeCollectives):
    """The ranks `members` of `whole`, numbered from 0 in that order; this rank is one of them.

    Everything goes by `exchange`, so the other ranks of the whole group need not take part. Bytes count with the whole
    group's.
    """

    def __init__(self, whole: Communicator, members: Sequence[int]) -> None:
        self._whole, self._members = whole, tuple(members)
        self.rank, self.size, self.bytes = self._members.index(whole.rank), len(self._members), whole.bytes

    @property
    def identity(self) -> Hashable:
        """The whole group's, and which ranks of it."""
        return (self._whole.identity, self._members) if self.size > 1 else None

    @property
    def device(self) -> torch.device:
        """The whole group's."""
        return self._whole.device

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        """See `Communicator.exchange`."""
        return self._whole.exchange(
            [send._replace(peer=self._members[send.peer]) for send in sends],
            [recv._replace(peer=self._members[recv.peer]) for recv in recvs],
        )
