"""`mllm-seqpar finetune` as a script: accelerate launch --config_file configs/fsdp2_cpu_2.yaml scripts/finetune.py --help"""

import sys

from mllm_seqpar.training.finetune import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
