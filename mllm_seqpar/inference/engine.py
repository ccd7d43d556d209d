"""The model on all ranks, and the jobs that it answers: messages about videos and images.

`ask`, for videos and for data sets, `chat`, `serve` and the model of lmms-eval have one engine each. It reads the
processor, which is cheap, when it is created. `load` reads the model, after the program has checked its inputs.

The ranks of the world form groups that work independently. The ranks of a group share each video (`DividedRanks`).

The conversations of the last jobs are kept, with the features of their media and the K and V of their text. A job
about the same media continues such a conversation, whoever sent it: only the tokens that differ are computed.

An error of one job must not end the program, and afterwards all ranks must keep the same conversations. All ranks
therefore agree on the outcome of each step before an answer (`Engine.settled`), and on an error that an answer raises
before its first forward pass (an option that `generate` refuses, for example). An error within a pass ends the program
if there are other ranks, because they wait for this one in a collective (`Engine.computed`).
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mllm_seqpar.chats.chat_family import ChatText, chat_family
from mllm_seqpar.chats.clip import Clip, FrameSource
from mllm_seqpar.cli.launch import collective_timeout
from mllm_seqpar.comm import Communicator, ProcessGroupCommunicator, Subgroup, as_communicator, transfer_communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.errors import ConfigError, DivergedError, NonFiniteLogitsError, TransferError
from mllm_seqpar.models.digests import model_digest
from mllm_seqpar.models.loading import layer_classes, load_model, load_processor
from mllm_seqpar.patching import patch_model

from .arguments import ModelOptions
from .conversation import Conversation
from .encoding import Progress, encoder_of
from .job import Job, JobError, Outcome

T = TypeVar("T")

_LONGEST_WAIT = timedelta(days=30)
"""A group may finish long before another one, so the usual timeout of a collective is too short at the end."""

_FATAL = (TransferError, DivergedError, dist.DistError, torch.AcceleratorError)
"""Errors after which no job can be answered: of transfers between ranks, and of the device."""


class Engine:
    """The model that options name, on the ranks of a group, and its last conversations. Every rank creates it.

    Args:
        options: the model and how it computes. If they have `sp`, groups of that many ranks work independently.
        world: all ranks.
        device: of this rank.
        keep: conversations to keep, 1 or more.

    Raises:
        SeqParError: on all ranks, if the processor cannot be read on one of them, or they have different models.
    """

    model: nn.Module  # patched over the group, after `load`

    def __init__(self, options: ModelOptions, world: Communicator, device: torch.device, keep: int = 1) -> None:
        self.options, self.device, self._keep = options, device, keep
        self.ranks = divide_ranks(world, getattr(options, "sp", None), options.timeout)
        self.comm, name = self.ranks.group, options.model
        self.processor, self.digest = agree(
            world, "model", lambda: (load_processor(name), model_digest(name)), lambda files: {"model": files[1]}
        )
        self.chat_format = chat_family(self.processor)
        self._conversations: OrderedDict[tuple[Clip, ...], Conversation] = OrderedDict()
        self._computing = False  # whether a pass has begun, so that other ranks may wait for this one

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
        self.model.register_forward_pre_hook(lambda *_: setattr(self, "_computing", True))

    def begin(
        self, job: Job, progress: Progress | None = None, interrupted: Callable[[], bool] | None = None
    ) -> tuple[Conversation, ChatText]:
        """Return the conversation about the media of a job, which are encoded, and the prompt of the job.

        The conversation is kept. If that of the same media, or of the first of them, is kept, it is continued. Every
        rank of the group calls this with the same job.

        Args:
            job: what is asked.
            progress, interrupted: as for `Conversation.encode`.

        Raises:
            JobError: on all ranks, if the media cannot be read, or the prompt is refused.
        """
        media, begun = job.media, None
        # The most of the media, from the first on, whose conversation is kept and can show the others; a conversation
        # of text alone is continued by text alone.
        for stop in range(len(media), 0, -1) if media else (0,):
            kept = self._conversations.get(media[:stop])
            if kept is not None and (stop == len(media) or kept.can_follow):
                begun = media[:stop]
                break

        def opened() -> Conversation:
            earlier = None if begun is None else self._conversations[begun]
            if earlier is not None and begun == media:
                return earlier
            new, decoding = media[len(begun or ()) :], self.options.decoding()
            return self.open(lambda: [clip.open(self.chat_format, **decoding) for clip in new], earlier)

        def encode() -> None:
            while begun is None and len(self._conversations) >= self._keep:  # free memory before it is needed
                self._conversations.popitem(last=False)
            conversation.encode(progress, interrupted)
            if begun is not None:
                del self._conversations[begun]  # whose cache continues in the new one
            self._conversations[media] = conversation

        conversation = self.settled(opened)
        prompt = self.settled(partial(conversation.prompt, job.messages, job.sampling.max_new_tokens))
        self.settled(encode)
        return conversation, prompt

    def open(self, sources: Callable[[], Sequence[FrameSource]], earlier: Conversation | None = None) -> Conversation:
        """Return a new conversation about the media that `sources` opens, or about those of `earlier` and these.

        Every rank of the group calls this.

        Raises:
            SeqParError: on all ranks, if one of them cannot open the media or has other numbers of frames.
        """
        opened = agree(self.comm, "media", sources, lambda found: {"frames": [len(source) for source in found]})
        if earlier is not None:
            return earlier.followed_by(opened)
        return Conversation(self.model, self.processor, opened, **self.options.encoding())

    def settled(self, step: Callable[[], T]) -> T:
        """Return what `step` returns; raise JobError on all ranks of the group if it fails on any of them."""
        result, error = attempt(step)
        try:
            self._raise_together(error)
        finally:
            del error  # its traceback refers to this frame
        return cast(T, result)

    def computed(self, step: Callable[[], T]) -> T:
        """Return what `step` returns, which runs the model. Every rank of the group calls this.

        Raises:
            JobError: on all ranks, if it fails before its first pass, by logits that are not finite, or on one process.
            Exception: what it raised within a pass, where other ranks may wait for this one.
        """
        self._computing = False
        result, error = attempt(step)
        try:
            if error is not None:
                # Logits that are not finite are found after the answer, on all ranks together.
                if self._computing and self.comm.size > 1 and not isinstance(error, NonFiniteLogitsError):
                    raise error
                self._raise_together(error)
        finally:
            del error  # its traceback refers to this frame
        return cast(T, result)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise JobError on all ranks if any of them has an error, whose tensors are freed."""
        if isinstance(error, _FATAL):
            raise error
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # they refer to the features of the job, and to the error
        raised_at = None if error is None else error.__traceback__
        own = 0 if error is None else int(Outcome.of(error))
        _, rows = agree(self.comm, "answering", numbers=lambda _: [own])
        outcomes = [row[0] for row in rows]
        if not any(outcomes):
            return
        outcome = Outcome(max(outcomes))
        if not {*outcomes} <= {Outcome.REFUSED, Outcome.INVALID}:
            self.forget()  # ranks may have kept different conversations
        _, cause = attempt(partial(agree, self.comm, "answering", error=error))
        assert cause is not None  # some rank has an error
        # The frames of `agree` refer to the error, and by their callers to the job's features, which would live until a
        # garbage collection.
        cause.__traceback__ = None if outcome is Outcome.REFUSED else raised_at
        raise JobError(cause, outcome) from cause

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
class DividedRanks:
    """The ranks of the world as `count` groups of consecutive ranks, of which `group` is this rank's."""

    world: Communicator
    group: Communicator
    index: int  # of this group, from 0
    count: int
    end: Communicator  # all ranks, with a time limit of days, for after the groups have worked independently


def divide_ranks(world: Communicator, size: int | None = None, timeout: float | None = None) -> DividedRanks:
    """Divide `world` into groups of `size` ranks, or into one of all ranks. Every rank calls this.

    Args:
        timeout: seconds until a collective of a group fails; see `collective_timeout`.

    Raises:
        ConfigError: if `size` does not divide the number of ranks.
    """
    if size is not None and world.size % size:
        raise ConfigError(f"--sp {size} does not divide the {world.size} ranks; use a divisor of {world.size}")
    if size in (None, world.size):
        return DividedRanks(world, world, 0, 1, world)
    members = [range(first, first + size) for first in range(0, world.size, size)]
    index = world.rank // size
    if not isinstance(world, ProcessGroupCommunicator):
        return DividedRanks(world, Subgroup(world, members[index]), index, len(members), world)
    limit = collective_timeout(timeout, world.device.type == "cuda")
    groups = [dist.new_group([*ranks], timeout=limit) for ranks in members]  # each rank creates all of them
    end = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    return DividedRanks(world, transfer_communicator(groups[index]), index, len(members), as_communicator(end))
