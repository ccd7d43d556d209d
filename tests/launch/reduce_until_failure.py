"""Run by ranks on several nodes: collectives until this rank fails, or another does.

    reduce_until_failure.py TIMEOUT FOLDER [RANK]   # a file per rank in FOLDER says that the group works

RANK raises after some collectives. TIMEOUT is that of the process group, in seconds.
"""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.cli.program_exit import run
from mllm_seqpar.errors import VideoError


def reduce(argv: Sequence[str]) -> None:
    timeout, folder, *failing = argv
    with launched_ranks("cpu", float(timeout)) as (comm, _):
        for step in range(6000):
            if step == 10:
                Path(folder, f"rank-{comm.rank}").touch()
                if str(comm.rank) in failing:
                    raise VideoError("clip.mp4: cannot be decoded")
            comm.all_reduce(torch.ones(1))
            time.sleep(0.02)


if __name__ == "__main__":
    # The launcher ends the other ranks of the node, and may do so first. The tests show that they end without it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run(reduce, sys.argv[1:])
