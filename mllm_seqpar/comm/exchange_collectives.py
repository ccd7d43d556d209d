"""The collectives, written with nothing but `exchange`: for transports that have no better."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Communicator, Recv, Send


class ExchangeCollectives(Communicator):
    """A communicator whose collectives are one grouped exchange each."""

    def all_gather(self, x: Tensor, label: str = "gather") -> list[Tensor]:
        """See `Communicator.all_gather`."""
        x = x.detach().contiguous()
        out = [x if peer == self.rank else torch.empty_like(x) for peer in range(self.size)]
        others = [peer for peer in range(self.size) if peer != self.rank]
        self.exchange([Send(p, x, label) for p in others], [Recv(p, out[p]) for p in others]).wait()
        return out

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "reduce_scatter") -> Tensor:
        """See `Communicator.reduce_scatter`."""
        mine = parts[self.rank].detach().contiguous()
        arrived = [mine if peer == self.rank else torch.empty_like(mine) for peer in range(self.size)]
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [Send(p, parts[p].detach().contiguous(), label) for p in others]
        self.exchange(sends, [Recv(p, arrived[p]) for p in others]).wait()
        return torch.stack(arrived).sum(0)  # in rank order: the same bits run to run

    def all_reduce(self, x: Tensor, label: str = "reduce") -> Tensor:
        """See `Communicator.all_reduce`."""
        return torch.stack(self.all_gather(x, label)).sum(0)
