"""Layer: gloo ranks. The transport over torch.distributed: groups, order, collectives, and a peer that dies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mllm_seqpar.attention import lv_xattn
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.errors import ConfigError, TransferError
from mllm_seqpar.sharding import frame_range
from ranks import RankDeath, ranks
from transport_cases import collectives, exchanges


def message_of(error: type[Exception], fn: Any, *args: Any) -> str:
    try:
        fn(*args)
    except error as raised:
        return str(raised)
    return "no error"


def every_operation(rank: int, world: int) -> dict[str, int]:
    comm = as_communicator(None)
    assert collectives(comm) == 2 * (world - 1) * 48 // world
    return exchanges(comm) if world > 1 else {"x": 46}


@pytest.mark.parametrize("n", [1, 3])
def test_exchanges_and_collectives(n: int) -> None:
    assert ranks(n).run(every_operation) == [{"x": 8 + 6 + 32}] * n


def groups(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = as_communicator(pairs[rank % 2])
    found["sub-group"] = (mine.rank, mine.size, [int(x) for x in mine.all_gather(torch.tensor(rank))])
    found["frames of the sub-group"] = list(frame_range(3, pairs[rank % 2]))
    left = DeviceMesh("cpu", [0, 1])
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    for name, group in (
        ("mesh", line),
        ("mesh dimension", square["sp"]),
        ("default", None),
        ("all", dist.group.WORLD),
    ):
        found[name] = (as_communicator(group).rank, as_communicator(group).size)
    found["itself"] = as_communicator(mine) is mine
    found["identity"] = [as_communicator(group).identity == mine.identity for group in (pairs[rank % 2], line)]
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
        assert found["mesh"] == found["default"] == found["all"] == (rank, 4)
        assert found["mesh dimension"] == (rank % 2, 2) and found["itself"] and found["identity"] == [True, False]
        assert torch.equal(found["attention"], results[0]["attention"])
        assert "a DeviceMesh of 2 dimensions ('dp', 'sp')" in found["square"] and 'mesh["sp"]' in found["square"]
        assert ("no error" if rank < 2 else "not a member") in found["left"]
        assert "not a member of the group" in found["not a member"] and "got int" in found["a number"]


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
