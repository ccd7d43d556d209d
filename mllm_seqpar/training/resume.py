"""Resuming `SeqParTrainer` on another number of ranks: possible if each step still reads the same samples.

`Trainer` resumes at a step and skips the batches before it. It trains on other samples, without an error, if a step
consists of more or fewer samples than in the run that wrote the checkpoint.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError, first_line

FILE = "seqpar_layout.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """How a run divides its samples and its weights.

    Attributes:
        processes: number of ranks.
        sequence_parallel_size: number of ranks that share a sample.
        per_device_train_batch_size: samples of a group in one micro-batch.
        gradient_accumulation_steps: micro-batches of a step.
        fsdp: whether FSDP shards the parameters, and thus the checkpoint.
        data: names the training data and their order; "" if it is not known, as with a data set of the user's.
    """

    processes: int
    sequence_parallel_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    fsdp: bool
    data: str = ""

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
        if then.data and self.data and then.data != self.data:
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} was written by a run on other data, in another order, or with "
                "another --seed (--data_seed); use the same, or start a new run from exported weights"
            )
        if then.fsdp is not self.fsdp:
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} was written {_with_fsdp(then.fsdp)}, but this run is "
                f"{_with_fsdp(self.fsdp)}, and the two formats differ; launch it {_with_fsdp(then.fsdp)}, which works "
                "on any number of processes from two on, or start a new run from exported weights"
            )


def last_checkpoint(output: str | Path) -> Path | None:
    """Return the last complete checkpoint in `output`, or None. The layout is the last file that is written."""
    found = {path.parent: _NAME.fullmatch(path.parent.name) for path in Path(output).glob(f"checkpoint-*/{FILE}")}
    steps = {path: int(name[1]) for path, name in found.items() if name}  # a directory that was renamed has no number
    return max(steps, key=lambda path: steps[path], default=None)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written.

    Raises:
        ConfigError: its `trainer_state.json` cannot be read.
    """
    try:
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--resume_from_checkpoint {checkpoint}: its trainer_state.json cannot be read "
            f"({type(error).__name__}: {first_line(error)}); give another checkpoint"
        ) from error


def find_checkpoint(resume: str | None, output: str | Path) -> Path | None:
    """Return the checkpoint to resume from: None for None, and for "auto" if there is no checkpoint yet.

    Raises:
        ConfigError: `resume` is not a complete checkpoint, or a new run would mix its checkpoints with older ones.
    """
    last = last_checkpoint(output)
    if resume is None and last is not None:
        raise ConfigError(
            f"--output_dir {output} has checkpoints of another run: use --resume_from_checkpoint auto, or another "
            "directory"
        )
    if resume is None or resume.lower() in ("auto", "true"):
        return last
    path = Path(resume)
    if not (path / FILE).is_file():
        raise ConfigError(
            f"--resume_from_checkpoint {resume} is not a complete checkpoint of this program (it has no {FILE}); "
            f"the last complete one in --output_dir is {last or 'none'}"
        )
    return path


def require_shared_directory(comm: Communicator, output: Path) -> None:
    """Create `output`; raise ConfigError on all ranks unless every rank finds the files that rank 0 writes there.

    All ranks write parts of a checkpoint. Without a common file system, nodes would fail only at the first checkpoint.
    """
    (name, *_) = comm.gather_texts(f".shared-{uuid.uuid4().hex}")

    def touch() -> None:
        if comm.rank == 0:
            try:
                output.mkdir(parents=True, exist_ok=True)
                (output / name).touch()
            except OSError as error:
                raise ConfigError(f"--output_dir {output}: cannot be written to: {error}") from error

    agree(comm, "output", touch)
    seen = [row[0] for row in comm.gather_ints([(output / name).exists()])]
    if comm.rank == 0:
        (output / name).unlink()
    if not all(seen):
        raise ConfigError(
            f"--output_dir {output}: ranks {', '.join(str(rank) for rank, found in enumerate(seen) if not found)} do "
            "not find the files of rank 0 there, but a checkpoint has files of all ranks; give a directory on a file "
            "system that all nodes share"
        )


def _with_fsdp(fsdp: bool) -> str:
    return "with FSDP" if fsdp else "without FSDP"
