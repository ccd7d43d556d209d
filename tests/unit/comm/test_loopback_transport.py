"""Layer: one process. What every transport does; loopback: order, failure of a rank, and gradients of collectives."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar.comm import (
    Communicator,
    LoopbackCommunicator,
    Recv,
    Send,
    Subgroup,
    TransferCounter,
    as_communicator,
    launched_processes,
    run_loopback,
)
from mllm_seqpar.comm.autograd import gather_shards, group_sum
from mllm_seqpar.errors import TransferError
from nccl_model import run_nccl_model
from transport_cases import collectives, exchanges

TRANSPORTS: dict[str, tuple[Any, Callable[[int], int]]] = {
    "loopback": (run_loopback, lambda n: (n - 1) * 48),
    **{
        f"model of NCCL, {timing}": (functools.partial(run_nccl_model, timing=timing), lambda n: 2 * (n - 1) * 48 // n)
        for timing in ("late", "early", "random")
    },
}
"""Runs a function on n ranks, and the bytes that a rank sends to reduce 48 bytes; tests/distributed/comm has gloo."""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_transport_exchanges_in_order_and_has_the_same_collectives(transport: str, n: int) -> None:
    run, reduced = TRANSPORTS[transport]
    assert run(n, exchanges) == [{"x": 8 + 6 + 32}] * n
    assert run(n, collectives) == [reduced(n)] * n
    if n == 4:
        run(n, lambda comm: collectives(Subgroup(comm, [comm.rank % 2, comm.rank % 2 + 2])))


def test_sender_may_change_its_tensor_after_wait() -> None:
    def run(comm: Communicator) -> list[float]:
        peer, x, received = 1 - comm.rank, torch.ones(3), torch.empty(3)
        comm.exchange([Send(peer, x, "x")], []).wait()
        x.zero_()
        comm.exchange([], [Recv(peer, received)]).wait()
        return received.tolist()

    assert run_loopback(2, run) == [[1, 1, 1]] * 2


def test_bytes_and_messages_are_counted_by_label() -> None:
    def run(comm: Communicator) -> TransferCounter:
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


def test_failures_are_raised_and_stop_all_ranks() -> None:
    def shapes(comm: Communicator) -> None:
        peer, x = 1 - comm.rank, torch.zeros(2 + comm.rank)
        comm.exchange([Send(peer, x, "x")], [Recv(peer, x.clone())]).wait()

    def missing(comm: Communicator) -> None:
        if comm.rank:
            comm.exchange([], [Recv(0, torch.empty(1))]).wait()

    def failing(comm: Communicator) -> None:
        if comm.rank == 2:
            raise LookupError("rank 2 failed")
        comm.all_gather(torch.zeros(1))

    with pytest.raises(TransferError, match="the ranks disagree on shapes"):
        run_loopback(2, shapes)
    with pytest.raises(TransferError, match="nothing arrived from rank 0 within 0.2 s"):
        run_loopback(2, missing, timeout=0.2)
    start = time.monotonic()
    with pytest.raises(LookupError, match="rank 2 failed"):
        run_loopback(4, failing)
    assert time.monotonic() - start < 100  # no rank waits for its time limit of 120 s


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


@pytest.mark.parametrize("group", [None, "self"])
def test_without_a_process_group_the_world_is_one_rank(group: str | None) -> None:
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
