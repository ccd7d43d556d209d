"""Forks two ranks per case, which use gloo and come to the interpreter's own end; writes their exit statuses.

A script by itself, so that no thread runs where it forks. The interpreter's lock goes to a gloo thread that asks for it
only after 20 s or when the main thread blocks: the thread then still holds tensors when the script ends.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from mllm_seqpar.comm.gloo_shutdown import release_gloo_at_exit

CASES = ("plain", "group destroyed and still referenced", "handles", "point to point", "failing")
WORLD = 2


def leave_a_thread_with(x: torch.Tensor) -> None:
    """Return when a collective is done, whose thread has had no chance yet to release its tensor."""
    dist.all_reduce(x)
    x.fill_(1.0)
    values = x.numpy()  # operations of tensors would give the interpreter's lock away
    dist.all_reduce(x, async_op=True)  # without the handle the thread is the last to release it
    while values[0] != WORLD:
        pass
    stop = time.monotonic() + 0.1
    while time.monotonic() < stop:
        pass


def use_gloo(case: str, rank: int) -> object:
    """Return what the rank still refers to when it ends."""
    x = torch.ones(1000)
    held: list[object] = [x, dist.group.WORLD]
    if case == "handles":
        held += [dist.all_reduce(torch.ones(9), async_op=True) for _ in range(20)]
    if case == "point to point":
        held += [dist.isend(torch.ones(9), 1 - rank), dist.irecv(torch.ones(9), 1 - rank)]
    leave_a_thread_with(x)
    if case.startswith("group destroyed"):
        dist.destroy_process_group()
    if case == "failing":
        sys.exit(3)
    return held


def child(case: str, rank: int, rendezvous: str) -> object:
    sys.setswitchinterval(20)
    store = dist.FileStore(rendezvous, WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    release_gloo_at_exit()
    return use_gloo(case, rank)


def fork_ranks(folder: str) -> dict[str, list[int]] | object:
    """In the parent: the statuses by case. In a child: what it still refers to."""
    ranks = {}
    for number, case in enumerate(CASES):
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                return child(case, rank, f"{folder}/{number}")
            ranks[pid] = case
    statuses: dict[str, list[int]] = {}
    for pid, case in ranks.items():
        statuses.setdefault(case, []).append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return statuses


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    outcome = fork_ranks(sys.argv[1])
    if isinstance(outcome, dict):
        sys.stdout.write(json.dumps(outcome))
