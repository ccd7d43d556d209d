"""A loopback transport that catches what a real one turns into rare wrong numbers.

Loopback copies what is sent when it is posted, so a buffer that is used again too early does no harm there, while a
real transfer may still be under way. This one spoils receive buffers when they are posted, and on `wait` checks that
nothing that was sent has changed since.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mllm_seqpar.comm import LoopbackCommunicator, Pending, Recv, Send


class StrictLoopback(LoopbackCommunicator):
    def __init__(self, comm: LoopbackCommunicator) -> None:
        super().__init__(comm.world, comm.rank)

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        before = [(s, s.tensor.clone()) for s in sends]
        pending = super().exchange(sends, recvs)
        for recv in recvs:
            recv.buffer.fill_(float("nan") if recv.buffer.is_floating_point() else -99)
        return _Checked(pending, before)


class _Checked(Pending):
    def __init__(self, pending: Pending, before: list[tuple[Send, Tensor]]) -> None:
        self._pending, self._before = pending, before

    def wait(self) -> None:
        for send, tensor in self._before:
            assert torch.equal(send.tensor, tensor), f"{send.label} changed while it was being sent to rank {send.peer}"
        self._pending.wait()
