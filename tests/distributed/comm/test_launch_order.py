"""Layer: gloo ranks. All ranks launch transfers and the collectives of FSDP2 and DDP in the same order.

Two NCCL communicators of one device deadlock if ranks launch their operations in different orders. gloo does not, so
the order is recorded and compared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from family_harness import family_module, inputs_of
from mllm_seqpar import patch_model
from ranks import ranks
from tiny_models.mplug_owl3 import Case as Owl
from tiny_models.mplug_owl3 import tiny_model


class Launch(NamedTuple):
    """One operation of one rank."""

    group: str
    operation: str
    peer: int | None


class Recorder(TorchDispatchMode):
    """Record every operation on a process group, also of DDP's C++ code."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            (group,) = (ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and is_group(x))
            self.launches.append(Launch(group.group_desc, name, args[2] if name in ("send", "recv_") else None))
        return func(*args, **(kwargs or {}))


def is_group(x: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(x._type())


def check_same_order(launches: list[list[Launch]]) -> None:
    """Compare the collectives of all ranks, and the sends with the receives between two collectives."""
    collectives = [[launch for launch in one if launch.peer is None] for one in launches]
    for rank, one in enumerate(collectives):
        assert one == collectives[0], f"rank {rank} launches collectives in another order than rank 0"
    sent, received = Counter(), Counter()
    for rank, one in enumerate(launches):
        number = 0
        for group, operation, peer in one:
            number += peer is None
            sent[number, group, rank, peer] += operation == "send"
            received[number, group, peer, rank] += operation == "recv_"
    assert +sent == +received, "a message is sent and received between different collectives"


def training_steps(rank: int, world: int, wrapper: str, options: dict[str, Any]) -> list[Launch]:
    model = tiny_model("per_head").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if wrapper == "FSDP2":
        for unit in family_module("mplug_owl3").shard_units(model):
            fully_shard(unit)
        fully_shard(model)
        patch_model(model, **options)
    else:
        patch_model(model, **options)
        model = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder() as recorder:
        for case in (Owl(frames=(3, 2)), Owl(frames=(1,)), Owl(frames=(0, 0), length=11)):
            model(**inputs_of("mplug_owl3", case, tiny_model("per_head"))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder.launches


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "strategy"), [("FSDP2", "lv-xattn"), ("FSDP2", "mesh"), ("DDP", "lv-xattn")])
def test_all_ranks_launch_in_the_same_order(wrapper: str, strategy: str) -> None:
    """Three ranks with 5 frames, with 1 frame on one of them, and with text only; layers are recomputed."""
    found = ranks(3).run(training_steps, wrapper, {"strategy": strategy})
    launches = [[Launch(*launch) for launch in one] for one in found]
    check_same_order(launches)
    by_group = Counter((launch.group == "mllm_seqpar transfers", launch.peer is None) for launch in launches[0])
    assert by_group[True, False] and by_group[False, True] and not by_group[False, False], by_group


def test_different_orders_are_found() -> None:
    first, second = Launch("a", "allreduce_", None), Launch("b", "allreduce_", None)
    with pytest.raises(AssertionError, match="rank 1 launches collectives in another order"):
        check_same_order([[first, second], [second, first]])
    send, receive = Launch("a", "send", 1), Launch("a", "recv_", 0)
    check_same_order([[send, second], [receive, second]])
    with pytest.raises(AssertionError, match="between different collectives"):
        check_same_order([[send, second], [second, receive]])
