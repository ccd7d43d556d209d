"""Layer: gloo ranks. The transport over torch.distributed: groups, order, collectives, and a peer that dies."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mllm_seqpar import _compat, patch_model
from mllm_seqpar.attention import lv_xattn, ulysses_attention
from mllm_seqpar.comm import as_communicator, process_group
from mllm_seqpar.errors import ConfigError, TransferError
from mllm_seqpar.sharding import frame_range
from ranks import RankDeath, ranks
from tiny_models.mplug_owl3 import tiny_frames, tiny_model, tiny_text
from transport_cases import collectives, exchanges


def message_of(error: type[Exception], fn: Any, *args: Any) -> str:
    try:
        fn(*args)
    except error as raised:
        return str(raised)
    return "no error"


def every_operation(rank: int, world: int, limit: int | None) -> dict[str, int]:
    comm = as_communicator(None)
    comm.operation_limit = limit
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of deprecated collectives
        assert collectives(comm) == 2 * (world - 1) * 48 // world
    return exchanges(comm) if world > 1 else {"x": 46}


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_exchanges_and_collectives(n: int, limit: int | None) -> None:
    """With a limit of 4, the four messages from one rank to another are launched in as many rounds."""
    assert ranks(n).run(every_operation, limit) == [{"x": 8 + 6 + 32}] * n


def uneven_attention(rank: int, world: int) -> list[Any]:
    """Return the rounds and the bytes of Ulysses with uneven keys, none on rank 1, and its largest difference."""
    comm, found = as_communicator(None), []
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, 3, 8), torch.randn(1, 6, 7, 8), torch.randn(1, 6, 7, 8)
    start, stop = ((0, 4), (4, 4), (4, 7))[rank]
    launched = mock.Mock(side_effect=dist.batch_isend_irecv)
    _ = comm.nodes  # gathered once for each group
    for limit in (None, 4):
        comm.operation_limit = limit
        comm.bytes.reset()
        launched.reset_mock()
        with mock.patch.object(dist, "batch_isend_irecv", launched):
            o = ulysses_attention(q, k[:, :, start:stop], v[:, :, start:stop], group=comm)
        longest = max(len(call.args[0]) for call in launched.call_args_list)
        found.append((launched.call_count, longest, dict(comm.bytes.sent)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return [*found, (o - expected).abs().max().item()]


def test_large_exchanges_are_divided_and_send_the_same_bytes() -> None:
    found = ranks(3).run(uneven_attention)
    for whole, divided, difference in found:
        assert divided[1] <= 4 and divided[0] >= whole[0]
        assert whole[2] == divided[2] and difference < 1e-5
    assert any(whole[1] > 4 and divided[0] > whole[0] for whole, divided, _ in found)


def one_tensor(rank: int, world: int) -> tuple[bool, dict[str, int]]:
    """Return whether gathered tensors share memory, which a gather into a list would copy, and which functions ran."""
    comm = as_communicator(None)
    first, second = comm.all_gather(torch.ones(3))
    calls = {}
    named = {name: mock.Mock(__name__=name) for name in ("all_gather_single", "reduce_scatter_single")}
    for version in ((2, 12), (2, 13)):
        with (
            mock.patch.object(_compat, "installed", return_value=version),
            mock.patch.multiple(dist, create=True, **named),  # torch 2.12 and earlier do not have them
        ):
            calls[str(version)] = [fn.__name__ for fn in process_group._single_tensor_collectives()]
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr(), calls


def test_collectives_gather_into_one_tensor_by_the_functions_of_the_torch_version() -> None:
    old, new = ["all_gather_into_tensor", "reduce_scatter_tensor"], ["all_gather_single", "reduce_scatter_single"]
    assert ranks(2).run(one_tensor) == [(True, {"(2, 12)": old, "(2, 13)": new})] * 2


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


def train_until_killed(rank: int, world: int) -> None:
    model, ids = patch_model(tiny_model().train()), tiny_text(3)
    for step in range(1000):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(ids, tiny_frames(3), labels=ids).loss.backward()


def test_rank_killed_in_training_raises_on_the_others() -> None:
    first, victim = ranks(2).errors(train_until_killed, timeout=60)
    assert isinstance(victim, RankDeath) and "exit code -9" in str(victim)
    assert "Another rank of the group has most likely ended" in str(first), first
