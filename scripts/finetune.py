"""Fine-tune a cross-attention MLLM on video over several processes.

    accelerate launch --config_file configs/fsdp2_cpu_2.yaml scripts/finetune.py \\
        --model DIR --data train.jsonl --output runs/first --strategy lv-xattn

--help lists the options. The code is in mllm_seqpar/training/.
"""

import logging
import os
import sys

from transformers.utils.logging import disable_progress_bar

from mllm_seqpar.cli.program_exit import run
from mllm_seqpar.training.loop import fine_tune

if __name__ == "__main__":
    logging.getLogger("mllm_seqpar").addHandler(logging.StreamHandler())
    logging.getLogger("mllm_seqpar").setLevel(logging.INFO)
    if os.environ.get("RANK", "0") != "0":
        disable_progress_bar()  # only rank 0 shows the progress of loading
    run(fine_tune, sys.argv[1:])
