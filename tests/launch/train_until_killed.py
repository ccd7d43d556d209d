"""Run by ranks on two nodes with an HSDP configuration: fine-tuning with and without HSDP; then rank 3 is killed.

    train_until_killed.py OUTPUT ARGUMENTS   # of scripts/finetune.py, without --output

The first run shards all parameters over all ranks. The second is that of the configuration, and ends in its last step.
Rank 0 writes which ranks share the shards of a parameter, and which have the same shard, to OUTPUT/groups.json.
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

from mllm_seqpar.cli.program_exit import run
from mllm_seqpar.training import loop


def train(argv: list[str]) -> None:
    output, *arguments = argv
    with mock.patch.dict(os.environ, ACCELERATE_USE_PARALLELISM_CONFIG="false"):
        everywhere = loop.prepare([*arguments, "--output", f"{output}/sharded"])
        loop.train(everywhere, 0)
    reset_accelerator()
    hybrid = loop.prepare([*arguments, "--output", f"{output}/hsdp"])
    if dist.get_rank() == 0:
        groups = [groups_of(next(iter(state.model.parameters()))) for state in (everywhere, hybrid)]
        Path(output, "groups.json").write_text(json.dumps(groups))
    if dist.get_rank() == 3:
        hybrid.order.__class__.step = killed_in(hybrid.steps - 1, hybrid.order.__class__.step)
    loop.train(hybrid, 0)


def groups_of(parameter: Any) -> list[list[Any]]:
    """Return [kind of placement, ranks of this rank's group] for each axis of a sharded parameter's mesh."""
    mesh = parameter.device_mesh
    return [
        [type(placement).__name__, dist.get_process_group_ranks(mesh.get_group(axis))]
        for axis, placement in enumerate(parameter.placements)
    ]


def killed_in(last: int, step: Any) -> Any:
    def samples(self: Any, number: int, group: int) -> Any:
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number, group)

    return samples


def reset_accelerator() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


if __name__ == "__main__":
    logging.getLogger("mllm_seqpar").addHandler(logging.StreamHandler())
    logging.getLogger("mllm_seqpar").setLevel(logging.INFO)
    if os.environ["RANK"] != "3":
        # The launcher ends the other rank of the node, and may do so first. The test shows that all end without it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run(train, sys.argv[1:])
