"""A job: the messages and the media that the model is asked about, and the outcome of a job on several ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, NoReturn, Self

import torch

from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.errors import AgreementError, DataError, NonFiniteLogitsError, VideoError

from .generation import Sampling


@dataclass(frozen=True, kw_only=True)
class Job:
    """Messages, the clips that their media parts show, in order, and how to answer."""

    messages: list[dict[str, Any]]
    media: tuple[Clip, ...] = ()
    sampling: Sampling
    stop: tuple[str, ...] = ()
    evidence: int = 0  # a number of moments

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "media": [clip.to_json() for clip in self.media]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        values["media"] = tuple(map(Clip.from_json, values["media"]))
        return cls(**values | {"sampling": Sampling(**values["sampling"]), "stop": tuple(values["stop"])})


class Outcome(IntEnum):
    """Why a job has no answer on a rank. The outcome of the job as a whole is the largest of all ranks."""

    REFUSED = 1
    """The job cannot be answered: a damaged video, a prompt that is too long."""
    INVALID = 2
    """The model or its options cannot answer such a job: a value that `generate` refuses."""
    FAILED = 3
    """The job raised an error that is neither of the input nor of the options."""
    OUT_OF_MEMORY = 4

    @classmethod
    def of(cls, error: Exception) -> Outcome:
        if isinstance(error, (VideoError, DataError, AgreementError, NonFiniteLogitsError)):
            return cls.REFUSED  # AgreementError: of the ranks on which nothing failed
        if isinstance(error, torch.OutOfMemoryError):
            return cls.OUT_OF_MEMORY
        return cls.INVALID if isinstance(error, ValueError) else cls.FAILED


class JobError(Exception):
    """A job that cannot be answered, because of the `cause` on any rank; the next one can follow."""

    def __init__(self, cause: Exception, outcome: Outcome = Outcome.REFUSED) -> None:
        self.cause, self.outcome = cause, outcome
        memory = outcome is Outcome.OUT_OF_MEMORY
        super().__init__("out of memory: use fewer frames, or start more ranks" if memory else str(cause))

    @property
    def of_the_input(self) -> bool:
        """Whether another job may well be answered: the video or the question caused the error, not the options."""
        return self.outcome in (Outcome.REFUSED, Outcome.OUT_OF_MEMORY)

    def raise_cause(self) -> NoReturn:
        """Raise the cause, with the errors that it had before and not this one in its traceback."""
        context = self.cause.__context__
        try:
            raise self.cause
        finally:
            self.cause.__context__ = context
