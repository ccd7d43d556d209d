"""Forks two ranks per case, which use gloo and run to the end of the interpreter; prints their exit statuses as JSON.

usage: gloo_exit_ranks.py FOLDER. It is a script of its own, because no thread may run in a process that forks. To
provoke an abort, the gloo thread must still hold tensors when the script ends. The ranks therefore set a switch
interval of 20 s, so that the thread gets the interpreter lock only when the main thread blocks.
"""

import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from mllm_seqpar.comm.gloo_exit import release_gloo_at_exit

WORLD = 2
EXPECTED = {"group referenced": 0, "group destroyed and referenced": 0, "unfinished handles": 0}
EXPECTED |= {"failing": 3, "peer raises": 1}
"""Exit status of both ranks by case."""


def leave_a_thread_with(x: torch.Tensor) -> None:
    """Return when a collective is done whose thread has not been able to release its tensor yet."""
    dist.all_reduce(x)
    x.fill_(1.0)
    values = x.numpy()  # operations of tensors would release the interpreter lock
    dist.all_reduce(x, async_op=True)  # without a reference to the handle, the thread is the last to release it
    while values[0] != WORLD:
        pass
    stop = time.monotonic() + 0.1
    while time.monotonic() < stop:
        pass


def run_rank(case: str, rank: int, rendezvous: str) -> object:
    """Return what the rank still refers to when it ends."""
    sys.setswitchinterval(20)
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, WORLD), rank=rank, world_size=WORLD)
    release_gloo_at_exit()
    x = torch.ones(1000)
    references: list[object] = [x, dist.group.WORLD]
    if case == "peer raises":
        if rank == 1:
            raise ValueError("rank 1 fails")
        dist.all_reduce(x)
    if case == "unfinished handles":
        references += [dist.all_reduce(torch.ones(9), async_op=True) for _ in range(20)]
        references += [dist.isend(torch.ones(9), 1 - rank), dist.irecv(torch.ones(9), 1 - rank)]
    leave_a_thread_with(x)
    if case == "group destroyed and referenced":
        dist.destroy_process_group()
    if case == "failing":
        sys.exit(3)
    return references


def main(folder: str) -> object:
    """Print the statuses by case; in a forked rank, return its references."""
    gc.freeze()  # the end of each rank collects only what the rank has made
    statuses: dict[str, list[int]] = {}
    for number, case in enumerate(EXPECTED):
        ranks = []
        for rank in range(WORLD):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                return run_rank(case, rank, f"{folder}/{number}")
        statuses[case] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.stdout.write(json.dumps(statuses))
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    kept_until_the_end = main(sys.argv[1])
