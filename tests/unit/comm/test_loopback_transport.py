"""Layer: one process. The loopback transport: order, misuse, failure of one rank, collectives."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from mllm_seqpar.comm import ByteCounter, Communicator, LoopbackCommunicator, LoopbackWorld, Recv, Send, run_loopback
from mllm_seqpar.comm.autograd import gather_shards, group_sum
from mllm_seqpar.errors import TransferError


def ring_hop(comm: Communicator) -> list[Tensor]:
    """Two tensors to the next rank in one exchange, and one of no elements."""
    mine = [torch.full((2,), float(comm.rank)), torch.full((3,), comm.rank, dtype=torch.int64), torch.empty(0, 4)]
    buffers = [torch.empty_like(x) for x in mine]
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    pending = comm.exchange([Send(after, x, "x") for x in mine], [Recv(before, b) for b in buffers])
    pending.wait()
    return buffers


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_messages_of_a_pair_arrive_in_the_order_they_are_listed(n: int) -> None:
    for rank, (a, b, empty) in enumerate(run_loopback(n, ring_hop)):
        assert a.tolist() == [(rank - 1) % n] * 2 and b.tolist() == [(rank - 1) % n] * 3 and empty.shape == (0, 4)


def test_a_sender_may_change_its_tensor_after_wait() -> None:
    def run(comm: Communicator) -> Tensor:
        peer, x, got = 1 - comm.rank, torch.ones(3), torch.empty(3)
        comm.exchange([Send(peer, x, "x")], []).wait()
        x.zero_()
        comm.exchange([], [Recv(peer, got)]).wait()
        return got

    assert all(got.tolist() == [1, 1, 1] for got in run_loopback(2, run))


def test_waiting_twice_is_an_error() -> None:
    pending = LoopbackCommunicator(LoopbackWorld(1), 0).exchange([], [])
    pending.wait()
    with pytest.raises(RuntimeError, match="waited for already"):
        pending.wait()


@pytest.mark.parametrize("side", ["send", "receive"])
def test_a_tensor_that_is_not_contiguous_is_refused(side: str) -> None:
    comm, x = LoopbackCommunicator(LoopbackWorld(2), 0), torch.zeros(3, 2).T
    with pytest.raises(ValueError, match="not contiguous"):
        comm.exchange([Send(1, x, "x")] if side == "send" else [], [Recv(1, x)] if side == "receive" else [])


def test_bytes_are_counted_by_label_where_they_are_sent() -> None:
    def run(comm: Communicator) -> ByteCounter:
        peer = 1 - comm.rank
        sends = [Send(peer, torch.zeros(5), "a"), Send(peer, torch.zeros(3, dtype=torch.bfloat16), "b")]
        comm.exchange(
            sends[: 2 - comm.rank], [Recv(peer, torch.empty(5)), Recv(peer, torch.empty(3).bfloat16())][: 1 + comm.rank]
        ).wait()
        return comm.bytes

    zero, one = run_loopback(2, run)
    assert dict(zero.sent) == {"a": 20, "b": 6} and zero.total == 26 and dict(zero.messages) == {"a": 1, "b": 1}
    assert dict(one.sent) == {"a": 20}
    zero.reset()
    assert zero.total == 0 and not zero.messages


def test_ranks_that_disagree_on_shapes_are_told() -> None:
    def run(comm: Communicator) -> None:
        peer = 1 - comm.rank
        comm.exchange([Send(peer, torch.zeros(2 + comm.rank), "x")], [Recv(peer, torch.zeros(2 + comm.rank))]).wait()

    with pytest.raises(TransferError, match="the ranks disagree on shapes"):
        run_loopback(2, run)


def test_one_ranks_failure_ends_all_and_is_what_is_raised() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 2:
            raise LookupError("rank 2 has lost its way")
        comm.all_gather(torch.zeros(1))

    start = time.monotonic()
    with pytest.raises(LookupError, match="rank 2 has lost its way"):
        run_loopback(4, run)
    assert time.monotonic() - start < 100  # no rank waits for its time limit, 120 s


def test_a_message_that_never_comes_ends_in_an_error() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank:
            comm.exchange([], [Recv(0, torch.empty(1))]).wait()

    with pytest.raises(TransferError, match="nothing arrived from rank 0 within 0.2 s"):
        run_loopback(2, run, timeout=0.2)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_collectives(n: int) -> None:
    def run(comm: Communicator) -> tuple[list[Tensor], Tensor, Tensor, Tensor, list[list[int]]]:
        x = torch.arange(6.0).view(2, 3).T + 10 * comm.rank  # not contiguous
        parts = [torch.full((2,), float(10 * comm.rank + r)) for r in range(comm.size)]
        return (
            comm.all_gather(x),
            comm.reduce_scatter(parts),
            comm.all_reduce(torch.ones(2) * comm.rank),
            comm.broadcast(torch.ones(2) + comm.rank),
            comm.gather_ints([comm.rank, -1]),
        )

    for rank, (gathered, scattered, reduced, sent, ints) in enumerate(run_loopback(n, run)):
        assert all(torch.equal(x, torch.arange(6.0).view(2, 3).T + 10 * r) for r, x in enumerate(gathered))
        assert scattered.tolist() == [sum(10 * r + rank for r in range(n))] * 2
        assert reduced.tolist() == [sum(range(n))] * 2 and sent.tolist() == [1, 1]
        assert ints == [[r, -1] for r in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_collectives_are_those_of_the_sum_of_all_losses(n: int, dtype: torch.dtype) -> None:
    weights = torch.randn(n, n, 4)

    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        x = torch.full((4,), 1.0 + comm.rank, dtype=dtype, requires_grad=True)
        y = torch.tensor(2.0, requires_grad=True)
        gathered = torch.stack(gather_shards(x, comm))
        (gathered.float() * weights[comm.rank]).sum().backward()
        group_sum(y * (1 + comm.rank), comm).backward()  # every rank reports this same loss
        return x.grad, y.grad

    for rank, (dx, dy) in enumerate(run_loopback(n, run)):
        expected = weights[:, rank].to(dtype).float().sum(0)
        assert torch.allclose(dx.float(), expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-6)
        assert dx.dtype is dtype and dy == n * (1 + rank)
