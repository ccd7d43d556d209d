"""`mllm-seqpar finetune` as a script, for `accelerate launch` from a checkout; --help lists the options."""

import sys

from mllm_seqpar.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))
