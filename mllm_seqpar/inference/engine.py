"""The model on all ranks, and the jobs that it answers: messages about videos and images.

`ask`, for videos and for data sets, `chat`, `serve` and the model of lmms-eval have one engine each. It reads the
processor, which is cheap, when it is created. `load` reads the model, after the program has checked its inputs.

The ranks of the world form groups that work independently. The ranks of a group share each video (`RankGroups`).

The conversations of the last jobs are kept, with the features of their media and the K and V of their text. A job
about the same media continues such a conversation, whoever sent it: only the tokens that differ are computed.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mllm_seqpar.chats.chat_family import ChatText, chat_family
from mllm_seqpar.chats.clip import Clip, FrameSource
from mllm_seqpar.cli.launch import collective_timeout
from mllm_seqpar.comm import Communicator, ProcessGroupCommunicator, Subgroup, as_communicator, transfer_communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.errors import AgreementError, ConfigError, DataError, SeqParError, VideoError, first_line
from mllm_seqpar.models.digests import model_digest
from mllm_seqpar.models.loading import layer_classes, load_model, load_processor
from mllm_seqpar.patching import patch_model

from .arguments import ModelOptions
from .conversation import Conversation
from .encoding import Progress, encoder_of
from .generation import Sampling

T = TypeVar("T")

_LONGEST_WAIT = timedelta(days=30)
"""A group may finish long before another one, so the usual timeout of a collective is too short at the end."""

_OF_THE_INPUT = (VideoError, DataError, AgreementError, torch.OutOfMemoryError)
"""Errors that a single video or question can cause. On ranks where nothing failed, a group raises AgreementError."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Messages, the clips that their media parts show, in order, and how to answer; `evidence` is a number of moments.

    The clips are files that all ranks find.
    """

    messages: list[dict[str, Any]]
    media: tuple[Clip, ...] = ()
    sampling: Sampling
    stop: tuple[str, ...] = ()
    evidence: int = 0

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "media": [clip.to_json() for clip in self.media]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        values["media"] = tuple(map(Clip.from_json, values["media"]))
        return cls(**values | {"sampling": Sampling(**values["sampling"]), "stop": tuple(values["stop"])})


class Engine:
    """The model that options name, on the ranks of a group, and its last conversations. Every rank creates it.

    Args:
        options: the model and how it computes. If they have `sp`, groups of that many ranks work independently.
        world: all ranks.
        device: of this rank.
        keep: conversations to keep, 1 or more.

    Attributes:
        ranks: all ranks, and this rank's group, which has a model of its own.
        comm: this rank's group.
        digest: of the model's files.
        processor, chat_format: of the model.
        model: patched over the group; after `load`.

    Raises:
        SeqParError: on all ranks, if the processor cannot be read on one of them, or they have different models.
    """

    model: nn.Module

    def __init__(self, options: ModelOptions, world: Communicator, device: torch.device, keep: int = 1) -> None:
        self.options, self.device, self._keep = options, device, keep
        self.ranks = divide_ranks(world, getattr(options, "sp", None), options.timeout)
        self.comm, name = self.ranks.group, options.model
        self.processor, self.digest = agree(
            world, "model", lambda: (load_processor(name), model_digest(name)), lambda found: {"model": found[1]}
        )
        self.chat_format = chat_family(self.processor)
        self._conversations: OrderedDict[tuple[Clip, ...], Conversation] = OrderedDict()

    def load(self) -> None:
        """Load the model and patch it. Every rank of the group calls this.

        Raises:
            SeqParError: on all ranks of the group, if one of them cannot load it, or it is not of this family.
        """
        options = self.options

        def load() -> nn.Module:
            model = load_for_inference(options.model, options.dtype, self.device, on_cpu=options.shard_weights)
            self.chat_format.check(model)
            return model

        model = agree(self.comm, "model", load)
        if options.shard_weights:
            model = shard_weights(model, self.comm, self.device, encode=encoder_of(model, self.chat_format))
        self.model = agree(self.comm, "options", lambda: patch_model(model, group=self.comm, config=options.config()))

    def open(self, sources: Callable[[], Sequence[FrameSource]]) -> Conversation:
        """Return a new conversation about the media that `sources` opens. Every rank of the group calls this.

        Raises:
            SeqParError: on all ranks, if one of them cannot open the media or has other numbers of frames.
        """
        opened = agree(self.comm, "media", sources, lambda found: {"frames": [len(source) for source in found]})
        return Conversation(self.model, self.processor, opened, **self.options.encoding())

    def prepare(
        self,
        job: Job,
        progress: Progress | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> tuple[Conversation, ChatText]:
        """Return the conversation about the media of a job, and the prompt, for `Conversation.answer`.

        The conversation is kept. If none was, the media are opened and encoded; if one about the first of them was, the
        others. After an exception on some of the ranks
        only, call `forget` on all, because they keep different conversations.

        Args:
            job: the same on all ranks.
            progress: as in `encode_video`.
            interrupted: ends the encoding when it returns True on this rank.

        Raises:
            SeqParError: on all ranks, among them Interrupted on the rank that `interrupted` ended.
            DivergedError: the other ranks wait for this one.
            Exception: of this rank only, such as OutOfMemoryError; AgreementError on the other ranks.
        """
        begun = self._begun(job.media)
        # A conversation of text alone is continued by text alone: `begun` is empty too if no media are kept.
        kept = self._conversations.get(begun) if begun or not job.media else None
        further = job.media[len(begun) :]
        conversation = kept if kept is not None and not further else self._opened(kept, further)
        limit = job.sampling.max_new_tokens
        text = agree(self.comm, "prompt", lambda: conversation.prompt(job.messages, limit))
        while kept is None and len(self._conversations) >= self._keep:  # free memory before the new one needs it
            self._conversations.popitem(last=False)
        conversation.encode(progress, interrupted)
        if further and kept is not None:
            del self._conversations[begun]  # whose cache continues in the new one
        self._conversations[job.media] = conversation
        self._conversations.move_to_end(job.media)
        return conversation, text

    def _begun(self, media: tuple[Clip, ...]) -> tuple[Clip, ...]:
        """Return the most of these media, from the first on, whose conversation is kept and can show the others."""
        for stop in range(len(media), 0, -1):
            found = self._conversations.get(media[:stop])
            if found is not None and (stop == len(media) or found.can_follow):
                return media[:stop]
        return ()

    def _opened(self, kept: Conversation | None, media: Sequence[Clip]) -> Conversation:
        """Return a conversation about the media of `kept`, if there is one, and then about these."""
        decoding = self.options.decoding()
        opened = self.open(lambda: [clip.open(self.chat_format, **decoding) for clip in media])
        return opened if kept is None else kept.followed_by(opened.sources)

    def forget(self) -> None:
        """Drop all kept conversations and free their memory."""
        self._conversations.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def load_for_inference(path: str, dtype: str, device: torch.device, *, on_cpu: bool = False) -> nn.Module:
    """Load the model in directory `path` in eval mode, on this rank's `device`, or on the CPU for `shard_weights`.

    Args:
        path: a directory that `save_pretrained` wrote, or a published checkpoint.
        dtype: one of `DTYPES` of `cli.launch`; auto is that of the checkpoint.
        device, on_cpu: where the model is.

    Raises:
        ConfigError: if there is no model, or it cannot be read.
    """
    kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    model = load_model(path, dtype=kind).eval().requires_grad_(False)
    return model if on_cpu else model.to(device)


def shard_weights(
    model: nn.Module, comm: Communicator, device: torch.device, encode: Callable[..., Tensor] | None = None
) -> nn.Module:
    """Shard the parameters over a group by FSDP2, in place; a layer is gathered for its forward, then freed.

    This is for models that do not fit on one device. Every generated token gathers every layer once; the embeddings and
    the output head stay gathered after the first token. The answers do not change.

    Args:
        model: on the CPU; its parameters move to `device` layer by layer.
        comm: the group; with one rank the model only moves.
        device: this rank's device.
        encode: becomes the model's `encode_frames` if it has none.
    """
    if comm.size == 1:
        return model.to(device)
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    if isinstance(comm, ProcessGroupCommunicator) and comm.size < dist.get_world_size():
        mesh = DeviceMesh.from_group(comm.group, device.type)
    else:
        mesh = init_device_mesh(device.type, (comm.size,))
    units = set(layer_classes(model))
    for module in reversed(list(model.modules())):  # inner modules first
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    if not hasattr(model, "encode_frames"):
        model.encode_frames = encode  # type: ignore[assignment]
    # encode_frames reads the root's parameters outside of the root's forward
    register_fsdp_forward_method(model, "encode_frames")
    return model


@dataclass(frozen=True)
class RankGroups:
    """The ranks of the world as `count` groups of consecutive ranks.

    Attributes:
        world: all ranks.
        group: the ranks of this rank's group.
        index: the number of this group, from 0.
        end: all ranks, with a time limit of days: for the collectives after the groups have worked independently.
    """

    world: Communicator
    group: Communicator
    index: int
    count: int
    end: Communicator


def divide_ranks(world: Communicator, size: int | None = None, timeout: float | None = None) -> RankGroups:
    """Divide `world` into groups of `size` ranks, or into one of all ranks. Every rank calls this.

    Args:
        timeout: seconds until a collective of a group fails; see `collective_timeout`.

    Raises:
        ConfigError: if `size` does not divide the number of ranks.
    """
    if size is not None and world.size % size:
        raise ConfigError(f"--sp {size} does not divide the {world.size} ranks; use a divisor of {world.size}")
    if size in (None, world.size):
        return RankGroups(world, world, 0, 1, world)
    members = [range(first, first + size) for first in range(0, world.size, size)]
    index = world.rank // size
    if not isinstance(world, ProcessGroupCommunicator):
        return RankGroups(world, Subgroup(world, members[index]), index, len(members), world)
    limit = collective_timeout(timeout, world.device.type == "cuda")
    groups = [dist.new_group([*ranks], timeout=limit) for ranks in members]  # each rank creates all of them
    end = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    return RankGroups(world, transfer_communicator(groups[index]), index, len(members), as_communicator(end))


def tried(group: Communicator, what: str, step: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return (what `step` returned, None), or (None, why not) on all ranks if the input made it fail on any rank.

    Args:
        group: every rank of it calls this.
        what: the subject of messages.
        step: either does not communicate, or raises on all ranks if it raises on one.

    Raises:
        SeqParError: on all ranks, if a rank raised one that the input cannot cause, such as ConfigError.
        Exception: any other error, at once: the other ranks may be in a collective of the step.
    """
    result, error = attempt(step)
    fatal = error is not None and not isinstance(error, _OF_THE_INPUT)
    if error is not None and fatal and not isinstance(error, SeqParError):
        raise error
    agree(group, what, error=error if fatal else None)
    try:
        agree(group, what, error=error)
    except _OF_THE_INPUT as found:
        found.__traceback__ = None  # its frames refer to it and to tensors, which would live until a garbage collection
        return None, first_line(found)
    return result, None
