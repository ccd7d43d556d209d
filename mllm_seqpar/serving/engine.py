"""The model on all ranks, and the jobs that it runs: an answer to messages about videos and images.

Rank 0 creates a job, checks it and sends it to the others. All ranks then prepare it and generate (`jobs.Worker`).

The conversations of the last jobs are kept, with the features of their media and the K and V of their text. A job about
the same media continues such a conversation, whoever sent it: only the tokens that differ are computed. Conversations
are added and dropped only when all ranks have prepared a job, or on all ranks together, so that all ranks keep the same
ones.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.data.chat_family import ChatText, chat_family
from mllm_seqpar.data.frame_choice import FrameChoice
from mllm_seqpar.data.sources import FrameSource, VideoSource
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.inference.arguments import ServingOptions
from mllm_seqpar.inference.conversation import Conversation
from mllm_seqpar.inference.generation import Answer, OnText, Sampling
from mllm_seqpar.inference.model_loading import load_patched
from mllm_seqpar.models.loading import load_processor, model_digest


@dataclass(frozen=True, kw_only=True)
class MediaFile:
    """A video or an image on disk.

    Attributes:
        kind: "video" or "image".
        path: the same file on all ranks.
        version: changes with the contents of the file.
        name: the user's name for it, for messages.
        frames: which frames of a video are used.
    """

    kind: str
    path: str
    version: str
    name: str = field(default="", compare=False)
    frames: FrameChoice = FrameChoice()

    @classmethod
    def of(cls, kind: str, path: str, frames: FrameChoice | None = None, *, name: str = "") -> MediaFile:
        """Return the file with its current version; raise ConfigError if there is none."""
        try:
            facts = os.stat(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give the path of a file") from error
        version = f"{facts.st_size} {facts.st_mtime_ns}"
        place = {"path": os.path.abspath(path), "version": version, "name": name or path}
        return cls(kind=kind, frames=frames or FrameChoice(), **place)

    def open(self, family: Any, **decoding: Any) -> FrameSource:
        """Return the frames of the file; `decoding` are the arguments `threads` and `decoder` of `VideoSource`."""
        if self.kind == "image":
            return family.image_source(self.path)
        return VideoSource.open(self.path, **vars(self.frames), **decoding)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Messages, the files of their media parts in order, and how to answer; `evidence` is a number of moments."""

    messages: list[dict[str, Any]]
    media: tuple[MediaFile, ...] = ()
    sampling: Sampling
    stop: tuple[str, ...] = ()
    evidence: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        media = (MediaFile(**item | {"frames": FrameChoice(**item["frames"])}) for item in values["media"])
        values["media"] = tuple(media)
        return cls(**values | {"sampling": Sampling(**values["sampling"]), "stop": tuple(values["stop"])})


class Engine:
    """A patched model that answers jobs, on every rank of `comm`.

    Args:
        args: the model and its options.
        comm: the ranks.
        device: of this rank.
        keep: conversations to keep, 1 or more.

    Attributes:
        computing: whether the first forward pass of the answer has begun, so that other ranks may wait for this one.

    Raises:
        SeqParError: on all ranks, if the model cannot be loaded on one of them.
    """

    def __init__(self, args: ServingOptions, comm: Communicator, device: torch.device, keep: int = 1) -> None:
        self.processor = agree(
            comm, "processor", lambda: load_processor(args.model), lambda _: {"model": model_digest(args.model)}
        )
        self.family = chat_family(self.processor)
        self.comm, self._encoding, self._decoding, self._keep = comm, args.encoding(), args.decoding(), keep
        self.model = load_patched(args, self.family, comm, device)
        self._conversations: OrderedDict[tuple[MediaFile, ...], Conversation] = OrderedDict()
        self.computing = False
        self.model.register_forward_pre_hook(lambda *_: setattr(self, "computing", True))

    def prepare(
        self,
        job: Job,
        progress: Callable[[int, int], object] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> tuple[Conversation, ChatText]:
        """Open and encode the media of a job that no kept conversation has, and tokenize its messages.

        The caller makes sure that all ranks have succeeded before it calls `answer`, which keeps the conversation.

        Args:
            job: the same on all ranks.
            progress: called with (frames that all ranks have encoded, all frames).
            interrupted: ends the encoding when it returns True on this rank.

        Raises:
            SeqParError: on all ranks, among them Interrupted on the rank that `interrupted` ended.
            DivergedError: the other ranks wait for this one.
            Exception: of this rank only, such as OutOfMemoryError; AgreementError on the other ranks.
        """
        conversation = kept = self._conversations.get(job.media)
        if conversation is None:
            conversation = Conversation.open(
                self.model,
                self.processor,
                lambda: [file.open(self.family, **self._decoding) for file in job.media],
                **self._encoding,
            )
        limit = job.sampling.max_new_tokens
        text = agree(self.comm, "prompt", lambda: conversation.prompt(job.messages, limit))
        while kept is None and len(self._conversations) >= self._keep:  # free memory before the new one needs it
            self._conversations.popitem(last=False)
        conversation.encode(progress, interrupted)
        return conversation, text

    def answer(
        self,
        job: Job,
        prepared: tuple[Conversation, ChatText],
        on_text: OnText | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Answer:
        """Generate the answer to a job that all ranks have prepared, and keep its conversation.

        `on_text` and `interrupted` are those of `Conversation.answer`.
        """
        conversation, text = prepared
        self.computing = False
        self._conversations[job.media] = conversation
        self._conversations.move_to_end(job.media)
        options: dict[str, Any] = {"stop": job.stop, "evidence": job.evidence}
        options["interrupted"] = interrupted or (lambda: False)  # rank 0 alone has one
        return conversation.answer(text, job.sampling, on_text=on_text, **options)

    def forget(self) -> None:
        """Drop all kept conversations and free their memory."""
        self._conversations.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
