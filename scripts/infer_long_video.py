"""Ask about a long video over several processes.

    accelerate launch --config_file configs/fsdp2_cpu_2.yaml scripts/infer_long_video.py \\
        --model DIR --video movie.mp4 --fps 1 --question "Who opens the door?" --question "When?"

torchrun, and plain python for one process, work too. --help lists the options. The code is in mllm_seqpar/inference/.
"""

import sys

from transformers.utils import logging

from mllm_seqpar.cli.program_exit import run
from mllm_seqpar.inference.run import infer

if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    run(infer, sys.argv[1:])
