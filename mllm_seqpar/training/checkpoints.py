"""Checkpoints: when all ranks save one together, and which ones a run may continue.

A checkpoint is a collective operation. If one rank raises alone, for example out of memory, the others cannot save
without it, and the last checkpoint is the one that the clock asked for. Errors that all ranks raise in the same step
are handled by `FineTuneTrainer`, which saves before it raises them.

`Trainer` resumes at a step and skips the batches before it. It trains on other samples, without an error, if a step
consists of more or fewer samples than in the run that wrote the checkpoint; `RunLayout` refuses this.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError, DataError, first_line
from mllm_seqpar.videos.files import write_json

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGAIN = 3.0
"""Ctrl-C within this many seconds counts once, because a terminal and a launcher may both send it."""

FILE = "seqpar_layout.json"
"""The last file of a checkpoint that is written: a checkpoint that has it is complete."""

_NAME = re.compile(r"checkpoint-(\d+)")

_log = get_logger(__name__)


class CheckpointClock(TrainerCallback):
    """Requests checkpoints by the clock of rank 0, and a last one if any rank receives SIGTERM or SIGINT.

    The callback of `Trainer` for SIGTERM (`enable_jit_checkpoint`) decides on each rank alone, so ranks would save at
    different steps.

    Args:
        comm: all ranks of the run: one small gather per step.
        minutes: from checkpoint to checkpoint; 0 for none.
        stop_after: the step after which the run saves and stops, or None.

    Attributes:
        signal: the signal that stopped the run, or 0.
        stops: whether a signal or `stop_after` stops the run.
        saved_step: the step of the last checkpoint, or the one that the run began with.
    """

    def __init__(self, comm: Communicator, minutes: float, stop_after: int | None) -> None:
        self._comm, self._seconds, self._stop_after = comm, 60 * minutes, stop_after
        self._since = time.monotonic()
        self._received = self.signal = 0
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}
        self.stops = False
        self.saved_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since, self.saved_step = time.monotonic(), state.global_step
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = self._seconds > 0 and time.monotonic() - self._since >= self._seconds
        rows = self._comm.gather_ints([int(due), self._received])
        self.signal = max(row[1] for row in rows)
        self.stops = bool(self.signal) or state.global_step == self._stop_after
        if self.stops:
            control.should_save = control.should_training_stop = True
        elif rows[0][0]:
            control.should_save = True
        self._leave_out_evaluation(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stops and state.epoch % 1:  # for Trainer, an epoch also ends when the run stops
            control.should_evaluate = control.should_save = False
        elif self.signal:
            self._leave_out_evaluation(state, control)
            control.should_save = False

    def _leave_out_evaluation(self, state: Any, control: Any) -> None:
        """After a signal, do not evaluate: the process may be killed before the checkpoint that would follow."""
        if self.signal and control.should_evaluate:
            control.should_evaluate = False
            _log.info("the evaluation after step %d is left out", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since, self.saved_step = time.monotonic(), state.global_step

    def restore_signals(self) -> None:
        """Restore the previous handlers of SIGTERM and SIGINT."""
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that is not Python's
        self._previous = {}

    def raise_late_signal(self) -> None:
        """Raise a signal that arrived after the last step, when no checkpoint follows, with its original handler."""
        if self._received and not self.signal:
            signal.raise_signal(self._received)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._received:
            if number == signal.SIGINT and time.monotonic() - self._received_at > _AGAIN:
                raise KeyboardInterrupt
            return
        self._received, self._received_at = number, time.monotonic()
        _log.warning("%s: saving a checkpoint after this step, then stopping", signal.Signals(number).name)


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """What must not change when a run is continued, on any number of ranks.

    Attributes:
        samples: number of samples of one step, over all groups.
        fsdp: whether FSDP shards the parameters, and thus the checkpoint.
        data: names the training data and their order; "" if it is not known, as with a data set of the user's.
    """

    samples: int
    fsdp: bool
    data: str = ""

    def write(self, checkpoint: str | Path) -> None:
        """Write this layout into the directory of a checkpoint, which is then complete."""
        write_json(Path(checkpoint) / FILE, asdict(self))

    def require_resumable(self, checkpoint: str | Path) -> None:
        """Raise ConfigError if this run cannot continue `checkpoint` with the same samples in each step.

        Nothing is checked for checkpoints of `transformers.Trainer`, which have no layout.
        """
        path = Path(checkpoint) / FILE
        if not path.is_file():
            return
        with _reading(path):
            layout: dict[str, Any] = json.loads(path.read_text())
            if "samples" not in layout:  # of version 0.2, whose digests of data cannot be compared
                groups = layout["processes"] // layout["sequence_parallel_size"]
                samples = groups * layout["per_device_train_batch_size"] * layout["gradient_accumulation_steps"]
                layout = {"samples": samples, "fsdp": layout["fsdp"]}
            then = RunLayout(**layout)
        written, running = ("with FSDP" if x.fsdp else "without FSDP" for x in (then, self))
        refused = [
            (
                then.samples != self.samples,
                f"by a run with {then.samples} samples per step, but this run has {self.samples} and would skip or "
                "repeat samples; choose per_device_train_batch_size and gradient_accumulation_steps so that a step has "
                f"{then.samples} samples",
            ),
            (
                then.data and self.data and then.data != self.data,
                "by a run on other data, in another order, or with another --seed (--data_seed); use the same, or "
                "start a new run from exported weights",
            ),
            (
                written != running,
                f"{written}, but this run is {running}, and the two formats differ; launch it {written}, which works "
                "on any number of processes from two on, or start a new run from exported weights",
            ),
        ]
        for applies, message in refused:
            if applies:
                raise ConfigError(f"resume_from_checkpoint: {checkpoint} was written {message}")


def checkpoint_step(checkpoint: str | Path) -> int:
    """Return the step after which `Trainer` saved a checkpoint.

    Raises:
        DataError: its trainer_state.json is missing or damaged, so that `Trainer` could not continue it.
    """
    path = Path(checkpoint) / TRAINER_STATE_NAME
    with _reading(path):
        return int(TrainerState.load_from_json(str(path)).global_step)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise DataError if the file of a checkpoint cannot be read inside, or lacks what is read."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        others = sorted({checkpoint.parent for checkpoint in path.parent.parent.glob(f"*/{FILE}")} - {path.parent})
        listed = ", ".join(map(str, others)) or "none, so start a new run in another directory"
        raise DataError(
            f"{path}: this file of the checkpoint cannot be read ({reason}); resume from another checkpoint. Complete "
            f"ones beside it: {listed}"
        ) from error


def last_checkpoint(output: str | Path) -> Path | None:
    """Return the last complete checkpoint in `output`, or None."""
    complete = [path.parent for path in Path(output).glob(f"checkpoint-*/{FILE}")]
    # A directory that was renamed has no number.
    steps = {path: int(name[1]) for path in complete if (name := _NAME.fullmatch(path.name))}
    return max(steps, key=lambda path: steps[path], default=None)


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
    rows = comm.gather_ints([(output / name).exists()])
    if comm.rank == 0:
        (output / name).unlink()
    if without := [str(rank) for rank, (exists,) in enumerate(rows) if not exists]:
        raise ConfigError(
            f"--output_dir {output}: ranks {', '.join(without)} do not find the files of rank 0 there, but a "
            "checkpoint has files of all ranks; give a directory on a file system that all nodes share"
        )
