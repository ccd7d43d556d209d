"""Layer: gloo ranks. The transport over torch.distributed: groups, order, and a peer that dies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mllm_seqpar.attention import lv_xattn
from mllm_seqpar.comm import LoopbackCommunicator, Recv, Send, as_communicator
from mllm_seqpar.errors import ConfigError, TransferError
from mllm_seqpar.sharding import frame_range
from ranks import RankDeath, ranks


def hop(rank: int, world: int) -> tuple[list[Tensor], str, dict[str, int]]:
    comm = as_communicator(None)
    mine = [torch.full((2,), float(rank)), torch.empty(0, 3), torch.full((3,), rank).bfloat16(), torch.arange(4) + rank]
    buffers = [torch.empty_like(x) for x in mine]
    after, before = (rank + 1) % world, (rank - 1) % world
    pending = comm.exchange([Send(after, x, "x") for x in mine], [Recv(before, b) for b in buffers])
    pending.wait()
    try:
        pending.wait()
        second = "hung or nothing"
    except RuntimeError as error:
        second = str(error)
    return buffers, second, dict(comm.bytes.sent)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_messages_arrive_in_order_and_waiting_twice_is_an_error(n: int) -> None:
    for rank, (got, second, sent) in enumerate(ranks(n).run(hop)):
        before = (rank - 1) % n
        assert got[0].tolist() == [before] * 2 and got[2].tolist() == [before] * 3
        assert got[1].shape == (0, 3) and got[3].tolist() == [before + i for i in range(4)]
        assert "waited for already" in second and sent == {"x": 8 + 6 + 32}


def groups(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = as_communicator(pairs[rank % 2])
    found["sub-group"] = (mine.rank, mine.size, [int(x) for x in mine.all_gather(torch.tensor(rank))])
    found["frames of the sub-group"] = list(frame_range(3, pairs[rank % 2]))
    left = DeviceMesh("cpu", [0, 1])
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    found["mesh"] = (as_communicator(line).rank, as_communicator(line).size)
    found["mesh dimension"] = (as_communicator(square["sp"]).rank, as_communicator(square["sp"]).size)
    found["default"] = (as_communicator().rank, as_communicator(dist.group.WORLD).size)
    found["itself"] = as_communicator(mine) is mine
    found["same group"] = as_communicator(pairs[rank % 2]).identity == mine.identity
    found["other group"] = as_communicator(line).identity == mine.identity
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    found["attention"] = lv_xattn(q, k, v, group=square["sp"])
    for name, bad in (("square", square), ("not a member", pairs[1 - rank % 2]), ("left", left), ("a number", 4)):
        try:
            as_communicator(bad)
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_may_be_given_as_a_group() -> None:
    results = ranks(4).run(groups)
    for rank, found in enumerate(results):
        assert found["sub-group"] == (rank // 2, 2, [rank % 2, rank % 2 + 2])
        assert found["frames of the sub-group"] == ([0, 1], [2])[rank // 2]
        assert found["mesh"] == (rank, 4) and found["mesh dimension"] == (rank % 2, 2) and found["default"] == (rank, 4)
        assert found["itself"] and found["same group"] and not found["other group"]
        assert torch.equal(found["attention"], results[0]["attention"])
        assert "a DeviceMesh of 2 dimensions ('dp', 'sp')" in found["square"] and 'mesh["sp"]' in found["square"]
        assert ("left" in found) == (rank > 1) and "not a member" in found.get("left", "not a member")
        assert "not a member of the group" in found["not a member"] and "got int" in found["a number"]


def test_without_a_process_group_the_whole_world_is_one_rank() -> None:
    comm = as_communicator(None)
    assert isinstance(comm, LoopbackCommunicator) and (comm.rank, comm.size) == (0, 1)


def refuse(rank: int, world: int) -> list[str]:
    comm, x, found = as_communicator(None), torch.zeros(3, 2).T, []
    for sends, recvs in (([Send(1 - rank, x, "x")], []), ([], [Recv(1 - rank, x)])):
        try:
            comm.exchange(sends, recvs)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    for found in ranks(2).run(refuse):
        assert len(found) == 2 and all("not contiguous" in message for message in found)


def collectives(rank: int, world: int) -> dict[str, Any]:
    comm = as_communicator(None)
    parts = [torch.full((2, 3), float(10 * rank + r)) for r in range(world)]
    return {
        "bools": comm.all_gather(torch.tensor([True, rank == 1])),
        "strided": comm.all_gather((torch.arange(6.0).view(2, 3) + rank).T),
        "scattered": comm.reduce_scatter(parts),
        "reduced": comm.all_reduce(torch.ones(2) * rank),
        "broadcast": comm.broadcast(torch.ones(2) + rank),
        "ints": comm.gather_ints([rank, 7]),
        "bytes": dict(comm.bytes.sent),
    }


@pytest.mark.parametrize("n", [1, 2, 3])
def test_collectives(n: int) -> None:
    for rank, found in enumerate(ranks(n).run(collectives)):
        assert [x.tolist() for x in found["bools"]] == [[True, r == 1] for r in range(n)]
        assert all(torch.equal(x, (torch.arange(6.0).view(2, 3) + r).T) for r, x in enumerate(found["strided"]))
        assert torch.equal(found["scattered"], torch.full((2, 3), float(sum(10 * r + rank for r in range(n)))))
        assert found["reduced"].tolist() == [sum(range(n))] * 2 and found["broadcast"].tolist() == [1, 1]
        assert found["ints"] == [[r, 7] for r in range(n)]
        if n > 1:
            assert found["bytes"]["gather"] == (n - 1) * (2 + 24) and found["bytes"]["reduce_scatter"] == (n - 1) * 24


def lose_a_peer(rank: int, world: int, victim: int) -> None:
    comm = as_communicator(None)
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    lv_xattn(q, k, v, group=comm)
    if rank == victim:
        os._exit(9)
    for _ in range(1000):
        lv_xattn(q, k, v, group=comm)


def test_a_killed_peer_is_an_error_in_the_others_long_before_any_timeout() -> None:
    """The group's timeout is minutes; the pool gives ranks 10 s after the first failure before it calls them hung."""
    first, victim, last = ranks(3).errors(lose_a_peer, 1, timeout=60)
    assert isinstance(victim, RankDeath)
    for error in (first, last):
        assert isinstance(error, TransferError), error
        assert "Another rank of the group has most likely ended" in str(error)
