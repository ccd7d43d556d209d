"""scripts/finetune.py with one rank that misbehaves: odd_rank.py WHAT [VALUE] -- arguments of the script.

WHAT is `add` (rank 1 gets the argument VALUE as well), `raise` (rank 1 cannot read the frames of its second step) or
`kill` (rank 1 kills itself there).
"""

import logging
import os
import signal
import sys

from mllm_seqpar.cli.failure import run
from mllm_seqpar.errors import VideoError
from mllm_seqpar.training import loop

split = sys.argv.index("--")
(what, *value), arguments = sys.argv[1:split], sys.argv[split + 1 :]
logging.getLogger("mllm_seqpar").addHandler(logging.StreamHandler())

if os.environ["RANK"] == "1":
    if what == "add":
        arguments += value
    else:
        one_step = loop._one_step

        def fail_in_the_second(run_: loop.TrainingRun, step: int, rate: float) -> dict:
            if step == 1:
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise VideoError("clip.mp4: cannot be decoded")
            return one_step(run_, step, rate)

        loop._one_step = fail_in_the_second
elif what == "kill":
    # The launcher ends the others too, and is at times the first: what is tested is that they end by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

run(loop.fine_tune, arguments)
