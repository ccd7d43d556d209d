"""Run by ranks on several nodes: collectives until another rank fails.

    reduce_until_failure.py TIMEOUT FOLDER

TIMEOUT is that of the process group, in seconds. Each rank writes two files into
FOLDER: started-R before it joins the group, for which all ranks wait, and reduces-R when the collectives work.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.cli.program_exit import run


def reduce(argv: Sequence[str]) -> None:
    timeout, folder = argv
    # Ranks start seconds apart on a busy machine, which may be more than the timeout.
    Path(folder, f"started-{os.environ['RANK']}").touch()
    while len([*Path(folder).glob("started-*")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    with launched_ranks("cpu", float(timeout)) as (comm, _):
        for step in range(6000):
            if step == 10:
                Path(folder, f"reduces-{comm.rank}").touch()
            comm.all_reduce(torch.ones(1))
            time.sleep(0.02)


if __name__ == "__main__":
    # The launcher ends the other ranks of the node, and may do so first. The tests show that they end without it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run(reduce, sys.argv[1:])
