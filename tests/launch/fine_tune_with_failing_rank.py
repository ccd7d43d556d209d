"""The fine-tuning program, with its arguments, and with a rank 1 that fails in step 3, after a checkpoint."""

import os
import signal
import sys
from typing import Any

from mllm_seqpar.__main__ import main
from mllm_seqpar.errors import VideoError
from mllm_seqpar.training.finetune_trainer import FineTuneTrainer

compute_loss = FineTuneTrainer.compute_loss


def fail_in_step_3(self: FineTuneTrainer, *args: Any, **kwargs: Any) -> Any:
    if self.state.global_step == 2:
        raise VideoError("clip.mp4: cannot be decoded")
    return compute_loss(self, *args, **kwargs)


if os.environ["RANK"] == "1":
    FineTuneTrainer.compute_loss = fail_in_step_3  # type: ignore[method-assign]
else:
    # The launcher ends the other ranks of the node, and may do so first. The test shows that they end without it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

main(["finetune", *sys.argv[1:]])
