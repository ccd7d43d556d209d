"""Fine-tune a cross-attention MLLM on video over several processes.

    accelerate launch --config_file configs/fsdp2_cpu_2.yaml scripts/finetune.py \\
        --model DIR --data train.jsonl --output runs/first --strategy lv-xattn

--help lists the options. The work is in mllm_seqpar/training/.
"""

import logging
import sys

from mllm_seqpar.training.failure import run
from mllm_seqpar.training.loop import fine_tune

if __name__ == "__main__":
    logging.getLogger("mllm_seqpar").addHandler(logging.StreamHandler())
    logging.getLogger("mllm_seqpar").setLevel(logging.INFO)
    run(fine_tune, sys.argv[1:])
