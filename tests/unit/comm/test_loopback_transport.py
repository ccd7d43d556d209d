"""Layer: one process. The loopback transport: order, misuse, failure of a rank, collectives and their gradients."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from mllm_seqpar.comm import (
    ByteCounter,
    Communicator,
    LoopbackCommunicator,
    LoopbackWorld,
    Recv,
    Send,
    Subgroup,
    as_communicator,
    launched_processes,
    run_loopback,
)
from mllm_seqpar.comm.autograd import gather_shards, group_sum
from mllm_seqpar.errors import TransferError


def ring_hop(comm: Communicator) -> list[Tensor]:
    """Send three tensors to the next rank in one exchange, one of them without elements."""
    tensors = [torch.full((2,), float(comm.rank)), torch.full((3,), comm.rank, dtype=torch.int64), torch.empty(0, 4)]
    buffers = [torch.empty_like(x) for x in tensors]
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.exchange([Send(after, x, "x") for x in tensors], [Recv(before, b) for b in buffers]).wait()
    return buffers


@pytest.mark.parametrize("n", [1, 2, 3])
def test_messages_of_a_pair_arrive_in_the_order_of_the_list(n: int) -> None:
    for rank, (a, b, empty) in enumerate(run_loopback(n, ring_hop)):
        assert a.tolist() == [(rank - 1) % n] * 2 and b.tolist() == [(rank - 1) % n] * 3 and empty.shape == (0, 4)


def test_sender_may_change_its_tensor_after_wait() -> None:
    def run(comm: Communicator) -> Tensor:
        peer, x, received = 1 - comm.rank, torch.ones(3), torch.empty(3)
        comm.exchange([Send(peer, x, "x")], []).wait()
        x.zero_()
        comm.exchange([], [Recv(peer, received)]).wait()
        return received

    assert all(received.tolist() == [1, 1, 1] for received in run_loopback(2, run))


def test_waiting_twice_raises() -> None:
    pending = LoopbackCommunicator(LoopbackWorld(1), 0).exchange([], [])
    pending.wait()
    with pytest.raises(RuntimeError, match="waited for already"):
        pending.wait()


def test_tensors_that_are_not_contiguous_are_rejected() -> None:
    comm, x = LoopbackCommunicator(LoopbackWorld(2), 0), torch.zeros(3, 2).T
    for sends, recvs in (([Send(1, x, "x")], []), ([], [Recv(1, x)])):
        with pytest.raises(ValueError, match="not contiguous"):
            comm.exchange(sends, recvs)


def test_bytes_and_messages_are_counted_by_label() -> None:
    def run(comm: Communicator) -> ByteCounter:
        peer = 1 - comm.rank
        sends = [Send(peer, torch.zeros(5), "a"), Send(peer, torch.zeros(3, dtype=torch.bfloat16), "b")]
        recvs = [Recv(peer, torch.empty(5)), Recv(peer, torch.empty(3).bfloat16())]
        comm.exchange(sends[: 2 - comm.rank], recvs[: 1 + comm.rank]).wait()
        return comm.bytes

    zero, one = run_loopback(2, run)
    assert dict(zero.sent) == {"a": 20, "b": 6} and zero.total == 26 and dict(zero.messages) == {"a": 1, "b": 1}
    assert dict(one.sent) == {"a": 20}
    zero.reset()
    assert zero.total == 0 and not zero.messages


def test_ranks_that_disagree_on_shapes_raise() -> None:
    def run(comm: Communicator) -> None:
        peer = 1 - comm.rank
        comm.exchange([Send(peer, torch.zeros(2 + comm.rank), "x")], [Recv(peer, torch.zeros(2 + comm.rank))]).wait()

    with pytest.raises(TransferError, match="the ranks disagree on shapes"):
        run_loopback(2, run)


def test_failure_of_one_rank_stops_all_and_is_raised() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 2:
            raise LookupError("rank 2 failed")
        comm.all_gather(torch.zeros(1))

    start = time.monotonic()
    with pytest.raises(LookupError, match="rank 2 failed"):
        run_loopback(4, run)
    assert time.monotonic() - start < 100  # no rank waits for its time limit of 120 s


def test_missing_message_raises_after_the_time_limit() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank:
            comm.exchange([], [Recv(0, torch.empty(1))]).wait()

    with pytest.raises(TransferError, match="nothing arrived from rank 0 within 0.2 s"):
        run_loopback(2, run, timeout=0.2)


def collectives(comm: Communicator) -> None:
    n = comm.size
    x = torch.arange(6.0).view(2, 3).T + 10 * comm.rank  # not contiguous
    for rank, gathered in enumerate(comm.all_gather(x)):
        assert torch.equal(gathered, torch.arange(6.0).view(2, 3).T + 10 * rank)
    parts = [torch.full((2,), float(10 * comm.rank + r)) for r in range(n)]
    assert comm.reduce_scatter(parts).tolist() == [sum(10 * r + comm.rank for r in range(n))] * 2
    assert comm.all_reduce(torch.ones(2) * comm.rank).tolist() == [sum(range(n))] * 2
    assert comm.broadcast(torch.ones(2) + comm.rank).tolist() == [1, 1]
    assert comm.gather_ints([comm.rank, -1]) == [[r, -1] for r in range(n)]
    for texts in (["", "h\u00e9", "x" * 300, "y"], [""] * 4):
        assert comm.gather_texts(texts[comm.rank]) == texts[:n]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_collectives(n: int) -> None:
    run_loopback(n, collectives)


def test_subgroup_uses_the_transport_of_its_parent() -> None:
    def run(comm: Communicator) -> tuple[int, list[float], int, bool]:
        members = [3, 1] if comm.rank % 2 else [0, 2]
        group = Subgroup(comm, members)
        collectives(group)
        comm.bytes.reset()
        gathered = [float(x) for x in group.all_gather(torch.tensor(float(comm.rank)))]
        return group.rank, gathered, comm.bytes.total, Subgroup(comm, members).identity == group.identity

    found = run_loopback(4, run)
    assert found == [(0, [0, 2], 4, True), (1, [3, 1], 4, True), (1, [0, 2], 4, True), (0, [3, 1], 4, True)]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_sum_of_all_losses(n: int, dtype: torch.dtype) -> None:
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


def test_without_a_process_group_the_world_is_one_rank() -> None:
    for group in (None, "self"):
        comm = as_communicator(group)
        assert isinstance(comm, LoopbackCommunicator) and (comm.rank, comm.size) == (0, 1)


@pytest.mark.parametrize(
    "variables,expected",
    [
        ({}, (1, "")),
        ({"WORLD_SIZE": "4"}, (1, "")),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, (8, "SLURM_STEP_NUM_TASKS")),
        ({"PMI_SIZE": "8", "PMI_RANK": "0", "WORLD_SIZE": "2", "RANK": "1"}, (2, "WORLD_SIZE")),
    ],
)
def test_innermost_launcher_gives_the_number_of_processes(
    variables: dict[str, str], expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_processes() == expected
