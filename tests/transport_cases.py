"""What every transport does; each function runs on all ranks of a group, and asserts."""

from __future__ import annotations

import torch

from mllm_seqpar.comm import Communicator, Recv, Send


def exchanges(comm: Communicator) -> dict[str, int]:
    """Send several tensors to the next rank in one exchange, one without elements; return the bytes by label."""
    n, before = comm.size, (comm.rank - 1) % comm.size
    comm.bytes.reset()
    tensors = [torch.full((2,), float(comm.rank)), torch.empty(0, 3), torch.full((3,), comm.rank).bfloat16()]
    tensors.append(torch.arange(4))
    buffers = [torch.empty_like(x) for x in tensors]
    pending = comm.exchange([Send((comm.rank + 1) % n, x, "x") for x in tensors], [Recv(before, b) for b in buffers])
    pending.wait()
    assert [b.tolist() for b in buffers] == [[before] * 2, [], [before] * 3, [0, 1, 2, 3]]
    buffers[0].zero_()
    pending.wait()
    assert buffers[0].tolist() == [0.0] * 2, "a second call does nothing"
    return dict(comm.bytes.sent)


def collectives(comm: Communicator) -> int:
    """Run every collective; return the bytes of the all-reduce of 48 bytes, which differ by transport."""
    n, rank = comm.size, comm.rank
    comm.bytes.reset()
    x = torch.arange(6.0).view(2, 3)
    for r, gathered in enumerate(comm.all_gather((x + 10 * rank).T)):  # not contiguous
        assert torch.equal(gathered, (x + 10 * r).T)
    assert [b.tolist() for b in comm.all_gather(torch.tensor([True, rank == 1]))] == [[True, r == 1] for r in range(n)]
    parts = [torch.full((2, 3), float(10 * rank + r)) for r in range(n)]
    assert comm.reduce_scatter(parts).tolist() == [[sum(10 * r + rank for r in range(n))] * 3] * 2
    assert comm.all_reduce(torch.ones(12) * rank).tolist() == [sum(range(n))] * 12
    sent = comm.bytes.sent
    assert sent.get("gather", 0) == (n - 1) * (2 + 24) and sent.get("reduce_scatter", 0) == (n - 1) * 24
    reduced = sent.get("reduce", 0)
    assert comm.broadcast(torch.ones(2) + rank).tolist() == [1, 1]
    assert comm.gather_ints([rank, -1]) == [[r, -1] for r in range(n)]
    for texts in (["", "h\u00e9\ud83d", "x" * 300, "y"], [""] * 4):
        assert comm.gather_texts(texts[rank]) == texts[:n]
    return reduced
