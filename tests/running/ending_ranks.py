"""Pairs of ranks over gloo that end as scripts do, without destroying their process group; prints all exit statuses.

ending_ranks.py {ends|raises} PAIRS. Each rank is a fork of this process, so that imports are paid for once. When a
rank ends, a thread of gloo waits for the interpreter's lock to release a tensor: the state that aborts a process.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mllm_seqpar import patch_model  # noqa: E402
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model  # noqa: E402

HELD: list[object] = []  # until the interpreter ends


def rank_main(rank: int, rendezvous: str, what: str, model: nn.Module) -> None:
    """Patch the model over two ranks, communicate, and return while gloo still holds a tensor."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, 2), rank=rank, world_size=2)
    HELD.extend((patch_model(model), dist.group.WORLD))
    if what == "raises":
        if rank == 1:
            raise ValueError("rank 1 cannot go on")
        dist.all_reduce(torch.ones(4))  # waits for rank 1
    kept = torch.ones(4)
    value = kept.numpy()
    sys.setswitchinterval(1000.0)  # nothing takes the lock from this thread
    dist.all_reduce(kept.view(2, 2), async_op=True)
    sleep_with_lock = ctypes.PyDLL(None).usleep
    while value[0] != 2.0:
        sleep_with_lock(1000)
    sleep_with_lock(300_000)  # gloo's thread reports the end meanwhile, and asks for the lock


def start(what: str, pair: int) -> list[int] | None:
    """Fork two ranks and return their process ids; None in a rank, when it has to end."""
    model = tiny_model("per_head")
    rendezvous = str(Path(tempfile.mkdtemp()) / f"pair{pair}")
    started = []
    for rank in range(2):
        process = os.fork()
        if process == 0:
            rank_main(rank, rendezvous, what, model)
            return None
        started.append(process)
    return started


def main() -> None:
    what, pairs = sys.argv[1], int(sys.argv[2])
    statuses = []
    for pair in range(pairs):
        started = start(what, pair)
        if started is None:
            return
        statuses.append([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started])
    sys.stdout.write(json.dumps(statuses))


if __name__ == "__main__":
    main()
