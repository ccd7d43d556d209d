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

Here the name has the given group's name, its ranks and a number, and nothing is split. The store counts the groups of a
name and its ranks. It can outlive the process group (`destroy_process_group`, then `init_process_group` again), and
a group that took the name of an earlier one would find the addresses of that one. Verified with the sources of torch
2.13.
"""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mllm_seqpar.errors import TransferError

from .backends import backends_of
from .gloo_exit import release_gloo_at_exit

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The transfer group of each group."""

_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The control group of each group that needs one of its own."""


def transfer_group(given: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group for the transfers among the ranks of `given`.

    The first call for a group creates it, so all ranks of the group must make the call; other ranks need not. Later
    calls return the same one until it is destroyed. A group of one rank, and one with backends other than gloo and
    NCCL, is returned itself.

    Raises:
        TransferError: a rank of the group did not call this function within the group's timeout, or it cannot connect.
    """
    group = _groups.get(given)
    if group is None or not is_open(group):
        group = _groups[given] = _make(given)
    return group


def control_group(given: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a process group of the ranks of `given` whose collectives take CPU tensors and do not use the device.

    It is `given` or its transfer group, if that has a backend for the CPU, and otherwise a gloo group, which the first
    call creates as `transfer_group` does. Without gloo, `given` is returned.
    """
    for known in (given, _groups.get(given)):
        if known is not None and is_open(known) and "cpu" in backends_of(known):
            return known
    group = _control_groups.get(given)
    if group is None or not is_open(group):
        group = _control_groups[given] = _make(given, control=True)
    return group


def destroy_transfer_group(given: dist.ProcessGroup) -> None:
    """Close the groups that this module made for `given`; all its ranks call this function."""
    for groups in (_groups, _control_groups):
        group = groups.pop(given, None)
        if group is not None and group is not given and is_open(group):
            dist.destroy_process_group(group)


def is_open(group: dist.ProcessGroup) -> bool:
    return group in distributed_c10d._world.pg_map


def _make(given: dist.ProcessGroup, *, control: bool = False) -> dist.ProcessGroup:
    """Connect the ranks of `given` in a new group: for transfers, or with gloo alone (`control`)."""
    ranks = dist.get_process_group_ranks(given)
    backends = backends_of(given)
    if len(ranks) == 1 or not set(backends.values()) <= {"gloo", "nccl"}:
        return given
    nccl = "nccl" in backends.values()
    timeout = _timeout_of(given, "cuda" if nccl else next(iter(backends)))
    try:
        prefix = f"{given.group_name}/mllm_seqpar/{ranks}{'/control' * control}"
        name, gloo = _meet(prefix, dist.get_rank(given), len(ranks), timeout)
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


def _meet(prefix: str, rank: int, size: int, timeout: timedelta) -> tuple[str, bool]:
    """Wait for all ranks without using the device; return a name for their group, and whether each can use gloo.

    Each rank counts its groups with this prefix in the store. If a rank does not come, the others take back what they
    have stored, so that the ranks can meet later.
    """
    store = distributed_c10d._get_default_store()
    name = f"{prefix}/{store.add(f'{prefix}/groups of {rank}', 1)}"
    members, keys = dist.PrefixStore(f"{name}/members", store), [str(member) for member in range(size)]
    members.set(str(rank), str(int(_has_gloo())))
    try:
        members.wait(keys, timeout)
    except RuntimeError:
        members.delete_key(str(rank))
        store.add(f"{prefix}/groups of {rank}", -1)
        raise
    return name, all(members.get(key) == b"1" for key in keys)


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
