"""Checkpoints in addition to --save_steps: all ranks decide together, at the end of a step, whether to save one.

A checkpoint is a collective operation. If one rank raises alone, for example out of memory, the others cannot save
without it, and the last checkpoint is the one that the clock asked for. Errors that all ranks raise in the same step
are handled by `FineTuneTrainer`, which saves before it raises them.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from transformers import TrainerCallback

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGAIN = 3.0
"""Ctrl-C within this many seconds counts once, because a terminal and a launcher may both send it."""

_log = get_logger(__name__)


class CheckpointClock(TrainerCallback):
    """Requests checkpoints by the clock of rank 0, and a last one if any rank receives SIGTERM or SIGINT.

    Args:
        comm: all ranks of the run, used by nothing else: one small gather per step.
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
