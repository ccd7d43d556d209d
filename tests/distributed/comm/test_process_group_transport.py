"""Layer: gloo ranks. The transport over torch.distributed: groups, order, collectives, and a peer that dies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mllm_seqpar.attention import lv_xattn
from mllm_seqpar.comm import Communicator, Recv, Send, as_communicator
from mllm_seqpar.errors import ConfigError, TransferError
from mllm_seqpar.sharding import frame_range
from ranks import RankDeath, ranks


def message_of(error: type[Exception], fn: Any, *args: Any) -> str:
    try:
        fn(*args)
    except error as raised:
        return str(raised)
    return "no error"


def exchanges(rank: int, world: int) -> dict[str, Any]:
    comm = as_communicator(None)
    tensors = [torch.full((2,), float(rank)), torch.empty(0, 3), torch.full((3,), rank).bfloat16(), torch.arange(4)]
    buffers = [torch.empty_like(x) for x in tensors]
    after, before = (rank + 1) % world, (rank - 1) % world
    pending = comm.exchange([Send(after, x, "x") for x in tensors], [Recv(before, b) for b in buffers])
    pending.wait()
    found: dict[str, Any] = {"received": buffers, "second wait": message_of(RuntimeError, pending.wait)}
    strided = torch.zeros(3, 2).T
    found["strided send"] = message_of(ValueError, comm.exchange, [Send(after, strided, "x")], [])
    found["strided receive"] = message_of(ValueError, comm.exchange, [], [Recv(before, strided)])
    return found | {"bytes": dict(comm.bytes.sent)}


def test_exchange_keeps_the_order_and_rejects_misuse() -> None:
    for rank, found in enumerate(ranks(3).run(exchanges)):
        before, received = (rank - 1) % 3, found["received"]
        assert received[0].tolist() == [before] * 2 and received[2].tolist() == [before] * 3
        assert received[1].shape == (0, 3) and received[3].tolist() == [0, 1, 2, 3]
        assert "waited for already" in found["second wait"] and found["bytes"] == {"x": 8 + 6 + 32}
        assert "not contiguous" in found["strided send"] and "not contiguous" in found["strided receive"]


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
        found[name] = message_of(ConfigError, as_communicator, bad)
    return found


def test_as_communicator_takes_groups_and_one_dimensional_meshes() -> None:
    results = ranks(4).run(groups)
    for rank, found in enumerate(results):
        assert found["sub-group"] == (rank // 2, 2, [rank % 2, rank % 2 + 2])
        assert found["frames of the sub-group"] == ([0, 1], [2])[rank // 2]
        assert found["mesh"] == (rank, 4) and found["mesh dimension"] == (rank % 2, 2) and found["default"] == (rank, 4)
        assert found["itself"] and found["same group"] and not found["other group"]
        assert torch.equal(found["attention"], results[0]["attention"])
        assert "a DeviceMesh of 2 dimensions ('dp', 'sp')" in found["square"] and 'mesh["sp"]' in found["square"]
        assert ("no error" if rank < 2 else "not a member") in found["left"]
        assert "not a member of the group" in found["not a member"] and "got int" in found["a number"]


def collectives(rank: int, world: int) -> dict[str, Any]:
    comm: Communicator = as_communicator(None)
    parts = [torch.full((2, 3), float(10 * rank + r)) for r in range(world)]
    found: dict[str, Any] = {
        "bools": [x.tolist() for x in comm.all_gather(torch.tensor([True, rank == 1]))],
        "strided": comm.all_gather((torch.arange(6.0).view(2, 3) + rank).T),
        "scattered": comm.reduce_scatter(parts),
        "reduced": comm.all_reduce(torch.ones(2) * rank).tolist(),
        "broadcast": comm.broadcast(torch.ones(2) + rank).tolist(),
        "ints": comm.gather_ints([rank, 7]),
        "texts": comm.gather_texts("h\u00e9" * rank),
    }
    return found | {"bytes": dict(comm.bytes.sent)}


@pytest.mark.parametrize("n", [1, 3])
def test_collectives(n: int) -> None:
    def expected(rank: int) -> Tensor:
        return torch.full((2, 3), float(sum(10 * r + rank for r in range(n))))

    for rank, found in enumerate(ranks(n).run(collectives)):
        assert found["bools"] == [[True, r == 1] for r in range(n)]
        assert all(torch.equal(x, (torch.arange(6.0).view(2, 3) + r).T) for r, x in enumerate(found["strided"]))
        assert torch.equal(found["scattered"], expected(rank))
        assert found["reduced"] == [sum(range(n))] * 2 and found["broadcast"] == [1, 1]
        assert found["ints"] == [[r, 7] for r in range(n)] and found["texts"] == ["h\u00e9" * r for r in range(n)]
        sent = found["bytes"]
        assert sent.get("gather", 0) == (n - 1) * (2 + 24) and sent.get("reduce_scatter", 0) == (n - 1) * 24
        assert sent.get("reduce", 0) == 2 * (n - 1) * 8 // n


def lose_a_peer(rank: int, world: int, victim: int) -> None:
    comm = as_communicator(None)
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    lv_xattn(q, k, v, group=comm)
    if rank == victim:
        os._exit(9)
    for _ in range(1000):
        lv_xattn(q, k, v, group=comm)


def test_killed_peer_raises_on_the_others_before_any_timeout() -> None:
    """The group's timeout is minutes. The pool counts a rank as hanging 10 s after the first failure."""
    first, victim, last = ranks(3).errors(lose_a_peer, 1, timeout=60)
    assert isinstance(victim, RankDeath)
    for error in (first, last):
        assert isinstance(error, TransferError), error
        assert "Another rank of the group has most likely ended" in str(error)
