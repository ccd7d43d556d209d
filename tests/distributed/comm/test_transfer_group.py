"""Layer: gloo ranks. Transfers run on a process group of their own, made once for each group that is given."""

from __future__ import annotations

import inspect
import logging
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from mllm_seqpar import comm as public
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.attention import lv_xattn
from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.comm import (
    ProcessGroupCommunicator,
    Subgroup,
    as_communicator,
    nccl_settings,
    process_group,
    transfer_communicator,
)
from mllm_seqpar.comm import transfer_group as module
from mllm_seqpar.comm.transfer_group import control_group
from mllm_seqpar.errors import ConfigError, TransferError
from mllm_seqpar.inference import encode_video
from mllm_seqpar.inference.engine import divide_ranks
from mllm_seqpar.integrations.transformers import tower
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.patching.patch import patch_of
from ranks import ranks
from tiny_models.mplug_owl3 import IMAGE_SIZE, tiny_model, tiny_tokenizer


def number_of_groups() -> int:
    return len(distributed_c10d._world.pg_names)


def one_group_for_all(rank: int, world: int) -> None:
    public.destroy()  # the ranks of the pool may have a transfer group of an earlier test
    before = number_of_groups()
    mesh = init_device_mesh("cpu", (world,))
    q = torch.randn(1, 2, 4, 8)
    models = [patch_model(tiny_model("per_head"), group=group) for group in (None, mesh, dist.group.WORLD)]
    lv_xattn(q, q, q)
    comms = [patch_of(model).context.comm for model in models]
    assert number_of_groups() - before == 1
    assert len({comm.transfers for comm in comms}) == 1 and comms[0].transfers is not dist.group.WORLD
    assert len({id(comm.bytes) for comm in comms}) == 3, "each model has a counter"
    assert all(comm.identity == as_communicator(None).identity for comm in comms)
    assert transfer_communicator(own := ProcessGroupCommunicator()) is own and own.transfers is own.group
    names = [comms[0].transfers.group_name]
    for model in models:
        unpatch_model(model)
    public.destroy(mesh)
    public.destroy(None)
    assert number_of_groups() == before
    for _ in range(2):
        comm = transfer_communicator(None)
        names.append(comm.transfers.group_name)
        assert [int(x) for x in comm.all_gather(torch.tensor(rank))] == [0, 1]
        public.destroy()
        with pytest.raises(TransferError, match="the process group is destroyed; call unpatch_model"):
            comm.gather_ints([rank])
    assert len(set(names)) == 3


def test_models_and_functions_share_one_group_that_is_never_the_given_one() -> None:
    ranks(2).run(one_group_for_all)


# A group keeps the order of its ranks where torch can be asked to; otherwise it sorts them.
UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
PAIR = [2, 0] if UNSORTED else [0, 2]


def subgroup_alone(rank: int, world: int) -> list[Any] | None:
    """Ranks 2 and 0 make a group while rank 1 does nothing, and rank 0 is a member of more groups than rank 2."""
    timeout = timedelta(seconds=23)
    dist.new_group([0, 1])
    pair = dist.new_group(PAIR, timeout=timeout, **UNSORTED)
    if rank == 1:
        return None
    comm = transfer_communicator(pair)
    world_group = dist.group.WORLD
    assert world_group is not None
    world_group.bound_device_id = torch.device("cuda", 0)  # as with init_process_group(..., device_id=...)
    try:
        public.destroy(pair)
        with mock.patch.object(distributed_c10d, "_get_split_source", side_effect=AssertionError("would be split")):
            comm = transfer_communicator(pair)
        bound = world_group.bound_device_id
    finally:
        world_group.bound_device_id = None
    options = comm.transfers._get_backend(torch.device("cpu")).options
    return [comm.rank, [int(x) for x in comm.all_gather(torch.tensor(rank))], options._timeout == timeout, str(bound)]


def test_ranks_of_a_subgroup_make_its_group_alone() -> None:
    found = ranks(3).run(subgroup_alone, timeout=60)
    assert found == [[PAIR.index(0), PAIR, True, "cuda:0"], None, [PAIR.index(2), PAIR, True, "cuda:0"]]


def missing_rank(rank: int, world: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        return ""
    with pytest.raises(TransferError) as raised:
        transfer_communicator(group)
    return str(raised.value)


def test_rank_that_does_not_take_part_is_reported() -> None:
    message = ranks(2).run(missing_rank, timeout=60)[0]
    assert "among the global ranks [0, 1] could not be made" in message and "must call patch_model" in message


def late_rank(rank: int, world: int) -> list[int]:
    """Rank 1 comes after rank 0 has given up; then both come."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(TransferError):
            transfer_communicator(group)
    dist.barrier()
    if rank == 1:
        with pytest.raises(TransferError):
            transfer_communicator(group)
    dist.barrier()
    return [int(x) for x in transfer_communicator(group).all_gather(torch.tensor(rank))]


def test_ranks_that_missed_each_other_meet_later() -> None:
    assert ranks(2).run(late_rank, timeout=60) == [[0, 1]] * 2


def group_again(rank: int, world: int) -> list[str]:
    """Patch, call, and lose the process group; then make the default group again over the same store."""
    model = patch_model(tiny_model("per_head"))
    comm = patch_of(model).context.comm
    assert isinstance(comm, ProcessGroupCommunicator)
    names = [comm.transfers.group_name]
    # What `destroy_process_group` does to the groups; torch's own, which would have to connect again, stays.
    dist.destroy_process_group(comm.transfers)
    module._groups.clear()
    found = []
    with pytest.raises(TransferError, match="the process group is destroyed; call unpatch_model and patch_model again"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)
    for _ in range(2):
        unpatch_model(model)
        patch_model(model)
        comm = patch_of(model).context.comm
        assert isinstance(comm, ProcessGroupCommunicator)
        names.append(comm.transfers.group_name)
        found.append(str(comm.gather_ints([rank])))
        dist.destroy_process_group(comm.transfers)
        module._groups.clear()
    return [*found, str(len(set(names)))]


def test_group_that_is_made_again_over_the_same_store_has_a_name_of_its_own() -> None:
    assert ranks(2).run(group_again, timeout=60) == [["[[0], [1]]", "[[0], [1]]", "3"]] * 2


def alone_then_together(rank: int, world: int, store: str) -> str:
    """Patch over a world of one rank, which is destroyed; then there is one of several ranks."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{store}-{rank}", 1), rank=0, world_size=1)
    model = patch_model(tiny_model("per_head"))
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    with pytest.raises(ConfigError, match="patched for one process") as raised:
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    unpatch_model(model)
    patch_model(model)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)
    return str(raised.value)


def test_model_of_a_world_of_one_is_refused_in_a_later_world_of_several(tmp_path: Path) -> None:
    pool = ranks(2)
    messages = pool.run(alone_then_together, str(tmp_path / "store"), timeout=60)
    assert all("2 ranks" in message and "patch_model" in message for message in messages)


class Options:
    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(0)


def nccl_arguments(rank: int, world: int, given: str, gloo: bool) -> dict[str, Any]:
    """Return how the group would be made for a given group of the backend config `given`."""
    made = mock.Mock(return_value=(object(), None))
    timeout = timedelta(seconds=31)
    with (
        mock.patch.object(dist, "get_backend_config", return_value=given),
        mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True),
        mock.patch.object(torch.cuda, "current_device", return_value=3),
        mock.patch.object(module, "_timeout_of", return_value=timeout),
        mock.patch.object(module, "_has_gloo", return_value=gloo or rank == 0),
        mock.patch.object(distributed_c10d, "_new_process_group_helper", made),
        mock.patch.dict(distributed_c10d._world.pg_group_ranks),
    ):
        module._make(dist.group.WORLD)
    named = made.call_args.kwargs
    options = named["backend_options"]
    assert options._timeout == named["timeout"] == timeout
    return {
        "backend": str(made.call_args.args[3]),
        "high priority": options.is_high_priority_stream,
        "device": str(named["device_id"]),
    }


@pytest.mark.parametrize(("given", "gloo"), [("cuda:nccl", True), ("cuda:nccl", False), ("cpu:gloo,cuda:nccl", True)])
def test_nccl_group_is_connected_at_once_with_high_priority_and_gloo_where_possible(given: str, gloo: bool) -> None:
    backend = "cpu:gloo,cuda:nccl" if gloo else "cuda:nccl"
    found = ranks(2).run(nccl_arguments, given, gloo)
    assert found == [{"backend": backend, "high priority": True, "device": "cuda:3"}] * 2


def integers_of_an_nccl_group(rank: int, world: int) -> tuple[str, str, list[list[int]], int | None]:
    """Gather integers over a communicator whose given group has NCCL only, and whose own group has gloo too."""
    both = {"cpu": "gloo", "cuda": "nccl"}
    with (
        mock.patch.object(process_group, "backends_of", return_value=both),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(torch.cuda, "current_device", return_value=rank),
    ):
        comm = ProcessGroupCommunicator()
        part = Subgroup(comm, range(world))
        assert part.control_device == comm.control_device
        return str(comm.device), str(comm.control_device), part.gather_ints([rank]), comm.operation_limit


def test_integers_do_not_use_the_device_of_nccl() -> None:
    found = ranks(2).run(integers_of_an_nccl_group)
    assert found == [(f"cuda:{rank}", "cpu", [[0], [1]], 256) for rank in range(2)]


def agreement_without_the_device(rank: int, world: int) -> list[Any]:
    """Agree over a group without a backend for the CPU, as NCCL's, whose device this machine does not have."""
    given = dist.new_group(backend="cuda:gloo")
    before = number_of_groups()
    assert isinstance(given, dist.ProcessGroup)
    ddp = SimpleNamespace(process_group=given, find_unused_parameters=True, static_graph=False)
    ddp._join_config, ddp.parameters = SimpleNamespace(enable=False), lambda: iter([torch.empty(0, device="meta")])
    with mock.patch.object(tower, "reducing_ddp", return_value=ddp):
        found = [tower.agree_on_frames(tiny_model("per_head"), rank, True, None) for _ in range(2)]
    groups = [control_group(given), control_group(dist.group.WORLD)]
    new = number_of_groups() - before
    public.destroy(given)
    return [found, new, groups[0] is not given, groups[1] is dist.group.WORLD, number_of_groups() - before]


def test_ranks_agree_on_frames_without_waiting_for_the_device() -> None:
    assert ranks(2).run(agreement_without_the_device) == [[[(1, None)] * 2, 1, True, True, 0]] * 2


def control_group_without_gloo(rank: int, world: int) -> bool:
    given = dist.new_group(backend="cuda:gloo")
    with mock.patch.object(module, "_has_gloo", return_value=rank == 0):
        return control_group(given) is control_group(given) is given


def test_group_itself_has_control_if_a_rank_has_no_gloo() -> None:
    assert ranks(2).run(control_group_without_gloo) == [True, True]


def warnings_of_two_patches(rank: int, world: int, nccl: bool) -> list[str]:
    messages: list[str] = []
    log = logging.getLogger("mllm_seqpar.comm.nccl_settings")
    nccl_settings.warn_about_settings.cache_clear()
    with (
        mock.patch.object(ProcessGroupCommunicator, "uses_nccl", nccl),
        mock.patch.object(log, "warning", lambda text, *args: messages.append(text % args)),
    ):
        for _ in range(2):
            patch_model(tiny_model("per_head"))
    return messages


def test_patching_warns_once_of_settings_that_hinder_nccl() -> None:
    first, other = ranks(2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).run(warnings_of_two_patches, True)
    assert len(first) == 1 and other == []
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in first[0] and "NCCL_LAUNCH_ORDER_IMPLICIT" in first[0]
    assert ranks(2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).run(warnings_of_two_patches, False) == [[], []]


def groups_of_inference(rank: int, world: int) -> list[bool]:
    """Return whether the ranks of a program, of its groups, and of `encode_video` have a transfer group."""
    public.destroy()
    with launched_ranks("cpu") as (comm, _):
        pair = divide_ranks(comm, 2).group
    public.destroy()
    before = number_of_groups()
    with pytest.raises(ConfigError, match="batch: 0"):
        processor = MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=IMAGE_SIZE), tiny_tokenizer())
        encode_video(tiny_model(), processor, [[None]], batch=0)  # type: ignore[arg-type]
    return [*(x.transfers is not x.group for x in (comm, pair)), number_of_groups() == before + 1]


def test_inference_agrees_over_groups_with_a_backend_for_the_cpu() -> None:
    """The groups that users and programs give have NCCL only, over which an agreement waits for the device."""
    assert ranks(4).run(groups_of_inference) == [[True] * 3] * 4
