"""Run by ranks on two nodes with an HSDP configuration: fine-tuning with and without HSDP; then rank 3 is killed.

    train_until_killed.py OUTPUT ARGUMENTS   # of the fine-tuning program, without --output_dir and --sp

The ranks of both nodes share each sample in the first run, which is complete, and those of one node in the others. The
first two runs shard all parameters over all ranks. The third is that of the configuration, and ends in its last step.
Rank 0 writes which ranks share the shards of a parameter, and which have the same shard, to OUTPUT/groups.json, and the
log of the third run to OUTPUT/hsdp/trainer_state.json.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from transformers import TrainerCallback

from mllm_seqpar.cli.program_exit import run
from mllm_seqpar.training import finetune


class KilledAtTheEnd(TrainerCallback):
    """Writes the log of a run, and ends rank 3 before the last step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps - 1:
            if dist.get_rank() == 0:
                self.path.write_text(json.dumps({"log_history": state.log_history}))
            if dist.get_rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)


def trainer(argv: list[str]) -> Any:
    return finetune.prepare(finetune.read_options(argv), None)[0]


def train(argv: list[str]) -> None:
    output, *arguments = argv
    with mock.patch.dict(os.environ, ACCELERATE_USE_PARALLELISM_CONFIG="false"):
        finetune.fine_tune([*arguments, "--sp", "4", "--output_dir", f"{output}/shared"])
        reset_accelerator()
        everywhere = trainer([*arguments, "--sp", "2", "--output_dir", f"{output}/sharded"])
        everywhere.train()
        everywhere.save_state()
    reset_accelerator()
    hybrid = trainer([*arguments, "--sp", "2", "--output_dir", f"{output}/hsdp"])
    hybrid.add_callback(KilledAtTheEnd(Path(output, "hsdp", "trainer_state.json")))
    hybrid.add_callback(Groups(Path(output, "groups.json"), everywhere.model))
    if dist.get_rank() != 3:
        # The launcher ends the other rank of the node, and may do so first. The test shows that all end without it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    hybrid.train()


class Groups(TrainerCallback):
    """Writes the groups of ranks of two runs when the second is sharded."""

    def __init__(self, path: Path, first: Any) -> None:
        self.path, self.first = path, first

    def on_train_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0:
            groups = [groups_of(next(iter(trained.parameters()))) for trained in (self.first, model)]
            self.path.write_text(json.dumps(groups))


def groups_of(parameter: Any) -> list[list[Any]]:
    """Return [kind of placement, ranks of this rank's group] for each axis of a sharded parameter's mesh."""
    mesh = parameter.device_mesh
    return [
        [type(placement).__name__, dist.get_process_group_ranks(mesh.get_group(axis))]
        for axis, placement in enumerate(parameter.placements)
    ]


def reset_accelerator() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


if __name__ == "__main__":
    logging.getLogger("mllm_seqpar").addHandler(logging.StreamHandler())
    logging.getLogger("mllm_seqpar").setLevel(logging.INFO)
    run(train, sys.argv[1:])
