"""Control of a generation from outside of the model: stop strings, interruption, and given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from mllm_seqpar.comm import Communicator

OnText = Callable[[str], object]


class ForcedTokens(LogitsProcessor):
    """Forces `tokens` to follow a prompt, whatever their probabilities."""

    def __init__(self, prompt_length: int, tokens: Sequence[int]) -> None:
        self._length, self._tokens = prompt_length, tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = input_ids.shape[1] - self._length
        if number >= len(self._tokens):  # the last step, whose token is not used
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[number]] = 0.0
        return forced


class StopWatch(StoppingCriteria):
    """Ends an answer at a stop string, or when rank 0 is interrupted; passes on text as soon as it is final.

    Text that may be the beginning of a stop string is held back. All ranks follow rank 0, by one small gather for each
    token, which does not wait for the device if the communicator has a backend for the CPU (`transfer_communicator`).
    """

    def __init__(
        self,
        comm: Communicator,
        stop: Sequence[str],
        on_text: OnText | None,
        interrupted: Callable[[], bool] | None,
    ) -> None:
        self._comm, self._stop, self._on_text, self._interrupted = comm, tuple(stop), on_text, interrupted
        self._text, self._passed = "", 0
        self.stopped = self.interrupted = False

    def put(self, piece: str) -> None:
        """Receive the next piece of the answer."""
        if self.stopped:
            return
        self._text += piece
        first = min((self._text.find(mark) for mark in self._stop if mark in self._text), default=None)
        if first is not None:
            self.stopped, self._text = True, self._text[:first]
        self._pass(len(self._text) - (0 if self.stopped else self._held_back()))

    def finish(self) -> str:
        """Pass on the text that was held back, and return the whole answer."""
        self._pass(len(self._text))
        return self._text

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._comm.rank == 0 and self._interrupted is not None and self._interrupted():
            self.interrupted = True
        stopped, interrupted = self._comm.gather_ints([self.stopped, self.interrupted])[0]
        self.stopped, self.interrupted = bool(stopped), bool(interrupted)
        done = self.stopped or self.interrupted
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)

    def _held_back(self) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        ends = (size for mark in self._stop for size in range(1, len(mark)) if self._text.endswith(mark[:size]))
        return max(ends, default=0)

    def _pass(self, stop: int) -> None:
        if self._on_text is not None and stop > self._passed:
            self._on_text(self._text[self._passed : stop])
        self._passed = max(self._passed, stop)
