"""`mllm-seqpar ask`, from a checkout: accelerate launch scripts/infer_long_video.py --model DIR --video movie.mp4."""

from mllm_seqpar.inference.ask import main

main()
