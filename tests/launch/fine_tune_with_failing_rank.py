"""scripts/finetune.py with a rank 1 that fails in step 3, after a checkpoint; takes the arguments of the script."""

import logging
import os
import signal
import sys
from typing import Any

from mllm_seqpar.cli.program_exit import run
from mllm_seqpar.errors import VideoError
from mllm_seqpar.training import loop

logging.getLogger("mllm_seqpar").addHandler(logging.StreamHandler())
one_step = loop._one_step


def fail_in_step_3(run_: loop.TrainingRun, step: int, rate: float) -> dict[str, Any]:
    if step == 2:
        raise VideoError("clip.mp4: cannot be decoded")
    return one_step(run_, step, rate)


if os.environ["RANK"] == "1":
    loop._one_step = fail_in_step_3
else:
    # The launcher ends the other ranks of the node, and may do so first. The test shows that they end without it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

run(loop.fine_tune, sys.argv[1:])
