"""Process groups for transfers only: one for each group that is passed to `patch_model` or to a function.

FSDP2 and DDP launch collectives on the group that they are given, which is often the default group: a DeviceMesh
dimension that spans all ranks returns it too. Transfers of attention on the same group would wait behind parameter
all-gathers and gradient reduce-scatters, because a group runs its operations in the order of their launch. They
therefore use a separate group of the same ranks in the same order, which is created once and shared by all models and
functional calls.

With NCCL, its stream has high priority, it connects immediately, and it has a gloo backend for CPU tensors, so that
rank agreement does not wait for the device. With gloo, it needs three threads, one socket for each other rank, one
listening socket, and about 15 ms for its creation.

`torch.distributed.new_group` cannot create such a group in general:

- Without `use_local_synchronization`, all ranks of the world have to call it, not only the members.
- With it, the name contains the number of groups that this process is a member of. The number can differ between the
  members, which then wait for each other under different names. After a group is destroyed, the next one gets its name
  and finds its addresses in the store.
- If the default group is bound to a device, NCCL splits the new group from it, in which all ranks take part.

Here the name is the name of the given group with a number, and nothing is split. Verified with the sources of torch
2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mllm_seqpar.errors import TransferError

from .backends import backends_of, release_gloo_at_exit


@dataclass
class _Entry:
    count: int = 0  # the number of groups so far, so that no two have the same name
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None


_entries: WeakKeyDictionary[dist.ProcessGroup, _Entry] = WeakKeyDictionary()


def transfer_group(given: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group for the transfers among the ranks of `given`.

    The first call for a group creates it, so all ranks of the group must make the call; other ranks need not. Later
    calls return the same one until it is destroyed. A group of one rank, and one with backends other than gloo and
    NCCL, is returned itself.

    Raises:
        TransferError: a rank of the group did not call this function within the group's timeout, or it cannot connect.
    """
    entry = _entries.setdefault(given, _Entry())
    if entry.group is None or not is_open(entry.group):
        entry.count += 1
        entry.group = _make(given, f"{given.group_name}/mllm_seqpar/{entry.count}")
    return entry.group


def control_group(given: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a process group of the ranks of `given` whose collectives take CPU tensors and do not use the device.

    It is `given` or its transfer group, if that has a backend for the CPU, and otherwise a gloo group, which the first
    call creates as `transfer_group` does. Without gloo, `given` is returned.
    """
    entry = _entries.setdefault(given, _Entry())
    for known in (given, entry.group, entry.control):
        if known is not None and is_open(known) and ("cpu" in backends_of(known) or known is entry.control):
            return known
    entry.count += 1
    entry.control = _make(given, f"{given.group_name}/mllm_seqpar/{entry.count}", control=True)
    return entry.control


def destroy_transfer_group(given: dist.ProcessGroup) -> None:
    """Close the groups that this module made for `given`; all its ranks call this function."""
    entry = _entries.get(given)
    if entry is not None:
        for group in (entry.group, entry.control):
            if group is not None and group is not given and is_open(group):
                dist.destroy_process_group(group)
        entry.group = entry.control = None


def is_open(group: dist.ProcessGroup) -> bool:
    return group in distributed_c10d._world.pg_map


def _make(given: dist.ProcessGroup, name: str, *, control: bool = False) -> dist.ProcessGroup:
    """Connect the ranks of `given` in a new group: for transfers, or with gloo alone (`control`)."""
    ranks = dist.get_process_group_ranks(given)
    backends = backends_of(given)
    if len(ranks) == 1 or not set(backends.values()) <= {"gloo", "nccl"}:
        return given
    nccl = "nccl" in backends.values()
    timeout = _timeout_of(given, "cuda" if nccl else next(iter(backends)))
    try:
        gloo = _all_have_gloo(name, dist.get_rank(given), len(ranks), timeout)
        if control and not gloo:
            return given
        nccl = nccl and not control
        config = {(True, True): "cpu:gloo,cuda:nccl", (True, False): "cuda:nccl"}.get((nccl, gloo), "gloo")
        group = _connect(name, ranks, dist.get_rank(given), config, timeout)
    except RuntimeError as error:
        raise TransferError(
            f"the process group for transfers among the global ranks {ranks} could not be made: {error}. All of these "
            "ranks must call patch_model, or the same function of mllm_seqpar.attention, with the same group, and with "
            "NCCL on a GPU of their own (torch.cuda.set_device); look for an earlier message of a rank that has ended"
        ) from error
    if gloo:
        release_gloo_at_exit()
    return group


def _connect(name: str, ranks: list[int], rank: int, config: str, timeout: timedelta) -> dist.ProcessGroup:
    options, device, world = None, None, dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    if "nccl" in config:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        # With a device, NCCL connects now and not at the first transfer, which may not involve all ranks.
        device = bound or torch.device("cuda", torch.cuda.current_device())
    world.bound_device_id = None  # otherwise the group is split from the default group
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            rank,
            ranks,
            dist.Backend(config),
            distributed_c10d._get_default_store(),
            name,  # type: ignore[arg-type]  # a NewType of str, which older versions of torch do not have
            backend_options=options,
            timeout=timeout,
            device_id=device,
            group_desc="mllm_seqpar transfers",
        )
    finally:
        world.bound_device_id = bound
    distributed_c10d._world.pg_group_ranks[group] = {member: i for i, member in enumerate(ranks)}
    return group


def _all_have_gloo(name: str, rank: int, size: int, timeout: timedelta) -> bool:
    """Wait for all ranks without using the device; return whether each of them can use gloo."""
    store = dist.PrefixStore(f"{name}/members", distributed_c10d._get_default_store())
    store.set(str(rank), str(int(_has_gloo())))
    members = [str(member) for member in range(size)]
    store.wait(members, timeout)
    return all(store.get(member) == b"1" for member in members)


def _has_gloo() -> bool:
    if not dist.is_gloo_available():
        return False
    try:
        dist.ProcessGroupGloo.create_default_device()
    except RuntimeError:  # the host's name has no address
        return False
    return True


def _timeout_of(group: dist.ProcessGroup, device: str) -> timedelta:
    backend = group._get_backend(torch.device(device))
    timeout: timedelta = getattr(
        backend, "wrapped_pg", backend
    ).options._timeout  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps
    return timeout
