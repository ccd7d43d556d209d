"""Run by one rank per node: collectives until the other node is lost, and `mllm-seqpar ask` when it is back.

    ask_after_a_lost_node.py TIMEOUT FOLDER ARGUMENTS   # of `mllm-seqpar ask`

TIMEOUT is that of the first process group, in seconds. The collectives run in a forked process, which ends when the
node is lost. Each rank R writes three files into FOLDER: started-R before it joins the group, for which all ranks
wait, reduces-R when the collectives work, and lost-R with the exit status of the forked process. All ranks then wait
for FOLDER/back.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from mllm_seqpar.__main__ import main
from mllm_seqpar.cli.launch import launched_ranks
from mllm_seqpar.cli.program_exit import run


def reduce(argv: Sequence[str]) -> None:
    timeout, folder = argv
    # Ranks start seconds apart on a busy machine, which may be more than the timeout.
    Path(folder, f"started-{os.environ['RANK']}").touch()
    while len([*Path(folder).glob("started-*")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    # The launcher's store keeps the addresses of a group, and the next group would connect to them.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(int(os.environ["MASTER_PORT"]) + 1))
    with launched_ranks("cpu", float(timeout)) as (comm, _):
        for step in range(6000):
            if step == 10:
                Path(folder, f"reduces-{comm.rank}").touch()
            comm.all_reduce(torch.ones(1))
            time.sleep(0.02)


if __name__ == "__main__":
    argv, folder = sys.argv[1:], Path(sys.argv[2])
    forked = os.fork()
    if forked == 0:
        os._exit(run(reduce, argv[:2]))
    status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    Path(folder, f"lost-{os.environ['RANK']}").write_text(str(status))
    while not Path(folder, "back").exists():
        time.sleep(0.05)
    sys.exit(main(["ask", *argv[2:]]))
