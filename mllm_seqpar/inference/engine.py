"""The model on all ranks, and the jobs that it answers: messages about videos and images.

`ask`, for videos and for data sets, `chat`, `serve` and the model of lmms-eval have one engine each. It reads the
processor, which is cheap, when it is created. `load` reads the model, after the program has checked its inputs.

The conversations of the last jobs are kept, with the features of their media and the K and V of their text. A job about
the same media continues such a conversation, whoever sent it: only the tokens that differ are computed.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from mllm_seqpar.comm import Communicator, ProcessGroupCommunicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.data.chat_family import ChatText, chat_family
from mllm_seqpar.data.frame_choice import FrameChoice
from mllm_seqpar.data.sources import FrameSource, VideoSource
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.loading import layer_classes, load_model, load_processor, model_digest
from mllm_seqpar.patching import patch_model

from .arguments import ModelOptions
from .conversation import Conversation
from .encoding import encoder_of
from .generation import Sampling
from .rank_groups import divide_ranks


@dataclass(frozen=True, kw_only=True)
class MediaFile:
    """A video or an image on disk.

    Attributes:
        kind: "video" or "image".
        path: the same file on all ranks.
        version: changes with the contents of the file, if they may change between jobs.
        name: the user's name for it, for messages.
        frames: which frames of a video are used.
    """

    kind: str
    path: str
    version: str = ""
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
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        media = (MediaFile(**item | {"frames": FrameChoice(**item["frames"])}) for item in values["media"])
        values["media"] = tuple(media)
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
        processor, family: of the model.
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
        self.family = chat_family(self.processor)
        self._conversations: OrderedDict[tuple[MediaFile, ...], Conversation] = OrderedDict()

    def load(self) -> None:
        """Load the model and patch it. Every rank of the group calls this.

        Raises:
            SeqParError: on all ranks of the group, if one of them cannot load it, or it is not of this family.
        """
        options = self.options

        def load() -> nn.Module:
            model = load_for_inference(options.model, options.dtype, self.device, on_cpu=options.shard_weights)
            self.family.check(model)
            return model

        model = agree(self.comm, "model", load)
        if options.shard_weights:
            model = shard_weights(model, self.comm, self.device, encode=encoder_of(model, self.family))
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
        progress: Callable[[int, int], object] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> tuple[Conversation, ChatText]:
        """Return the conversation about the media of a job, and the prompt, for `Conversation.answer`.

        The conversation is kept. If none was, the media are opened and encoded. After an exception on some of the ranks
        only, call `forget` on all, because they keep different conversations.

        Args:
            job: the same on all ranks.
            progress: called with (frames that all ranks have encoded, all frames).
            interrupted: ends the encoding when it returns True on this rank.

        Raises:
            SeqParError: on all ranks, among them Interrupted on the rank that `interrupted` ended.
            DivergedError: the other ranks wait for this one.
            Exception: of this rank only, such as OutOfMemoryError; AgreementError on the other ranks.
        """
        kept, decoding = self._conversations.get(job.media), self.options.decoding()
        conversation = kept or self.open(lambda: [file.open(self.family, **decoding) for file in job.media])
        limit = job.sampling.max_new_tokens
        text = agree(self.comm, "prompt", lambda: conversation.prompt(job.messages, limit))
        while kept is None and len(self._conversations) >= self._keep:  # free memory before the new one needs it
            self._conversations.popitem(last=False)
        conversation.encode(progress, interrupted)
        self._conversations[job.media] = conversation
        self._conversations.move_to_end(job.media)
        return conversation, text

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
    import torch.distributed as dist
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
