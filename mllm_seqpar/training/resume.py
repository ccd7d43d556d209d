"""Resuming `SeqParTrainer` on another number of ranks: possible if each step still reads the same samples.

`Trainer` resumes at a step and skips the batches before it. It trains on other samples, without an error, if a step
consists of more or fewer samples than in the run that wrote the checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import ConfigError

FILE = "seqpar_layout.json"


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """How a run divides its samples and its weights.

    Attributes:
        processes: number of ranks.
        sequence_parallel_size: number of ranks that share a sample.
        per_device_train_batch_size: samples of a group in one micro-batch.
        gradient_accumulation_steps: micro-batches of a step.
        fsdp: whether FSDP shards the parameters, and thus the checkpoint.
    """

    processes: int
    sequence_parallel_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    fsdp: bool

    @property
    def samples(self) -> int:
        """Number of samples of one step, over all groups."""
        groups = self.processes // self.sequence_parallel_size
        return groups * self.per_device_train_batch_size * self.gradient_accumulation_steps

    def __str__(self) -> str:
        return (
            f"{self.samples} samples per step ({self.processes // self.sequence_parallel_size} groups of "
            f"{self.sequence_parallel_size} ranks, per_device_train_batch_size={self.per_device_train_batch_size}, "
            f"gradient_accumulation_steps={self.gradient_accumulation_steps})"
        )

    def write(self, checkpoint: str | Path) -> None:
        """Write this layout into the directory of a checkpoint."""
        (Path(checkpoint) / FILE).write_text(json.dumps(asdict(self)) + "\n")

    def require_resumable(self, checkpoint: str | Path) -> None:
        """Raise ConfigError if this run cannot continue `checkpoint` with the same samples in each step.

        Nothing is checked for checkpoints of `transformers.Trainer`, which have no layout.
        """
        path = Path(checkpoint) / FILE
        if not path.is_file():
            return
        found: dict[str, Any] = json.loads(path.read_text())
        then = RunLayout(**found)
        if then.samples != self.samples:
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} was written by a run with {then}, but this run has {self}. It "
                "would skip or repeat samples; choose per_device_train_batch_size and gradient_accumulation_steps so "
                f"that a step has {then.samples} samples"
            )
        if then.fsdp is not self.fsdp:
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} was written {_with_fsdp(then.fsdp)}, but this run is "
                f"{_with_fsdp(self.fsdp)}, and the two formats differ; launch it {_with_fsdp(then.fsdp)}, which works "
                "on any number of processes from two on, or start a new run from exported weights"
            )


def _with_fsdp(fsdp: bool) -> str:
    return "with FSDP" if fsdp else "without FSDP"
