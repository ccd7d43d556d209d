"""Micro-batches of a data set; each rank decodes only its frame shard. `batches` yields them in training order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.base import fingerprint
from mllm_seqpar.data.chat import ChatBatch, ChatDataset, load_local_images
from mllm_seqpar.data.chat_family import ChatFamily, chat_family
from mllm_seqpar.data.chat_format import media_parts, part_files
from mllm_seqpar.data.formats.tables import is_embedded
from mllm_seqpar.data.media_files import is_remote, media_size
from mllm_seqpar.errors import DataError, VideoError
from mllm_seqpar.sharding import FrameShard


@dataclass(frozen=True)
class ShardedBatch:
    """One micro-batch of this rank's group: tokenized text, and frames that are not decoded yet.

    Attributes:
        chat: the text, the locations of the frames, and their numbers over the whole group.
        family: that of the model, which defines the arguments of forward.
        group: the ranks that share the frames: a process group, a one-dimensional mesh, a communicator, or None for
            all.
    """

    chat: ChatBatch
    family: ChatFamily
    group: Any

    @classmethod
    def of(cls, dataset: ChatDataset, samples: Sequence[int], group: Any = None) -> ShardedBatch:
        """Return the samples with these numbers as one micro-batch, without decoding frames.

        Raises:
            DataError: if no sample has a target token, or a sample is too long.
            MediaError: if a video cannot be opened.
        """
        chat = dataset.batch(samples)
        if chat.targets == 0:
            raise DataError(f"{', '.join(chat.places)}: no target tokens; add a message of the assistant")
        return cls(chat, chat_family(dataset.processor), group)

    @property
    def frame_bytes(self) -> int:
        """The bytes of this rank's frames, as `inputs` returns them."""
        family = self.family
        local = len(FrameShard.of(len(self.chat.text.slots), self.group, family.frame_layout))
        return local * sum(x.nbytes for x in family.blank()) if local else 0

    def inputs(self, device: torch.device, *, decode: bool = True) -> dict[str, Any]:
        """Decode this rank's frames and return the arguments of the model's forward, including labels, on `device`.

        Without `decode`, blank images that take the memory of one stand for the frames.
        """
        family = self.family
        arguments: dict[str, Any] = family.arguments(self.chat.text)
        total = len(self.chat.text.slots)
        if total:
            shard = FrameShard.of(total, self.group, family.frame_layout)
            if decode:
                pixels = load_local_images(self.chat, shard.ranges, family)
            else:
                pixels = tuple(x.expand(len(shard), *x.shape[1:]) for x in family.blank())
            arguments |= dict(zip(family.frame_names, pixels, strict=True))
            if as_communicator(self.group).size > 1 or family.always_sharded:
                arguments["visual_shard"] = shard
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        return moved | {"use_cache": False}


def data_digest(dataset: ChatDataset) -> str:
    """Return a hash of the records of a data set, and of the names and sizes of their media files."""
    media = (f"{name} {size}" for name, size in media_sizes(dataset))
    return f"{dataset.digest[:16]}-{fingerprint(chr(10).join(media)):016x}"


def media_sizes(dataset: ChatDataset) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of each video and image that a data set names, in order.

    The size is -1 if the file is missing and -2 for a URL. Files inside a table are left out: its digest covers them.
    """
    for index in range(len(dataset)):
        for part in media_parts(dataset.messages(index)):
            for name in part_files(part):
                if not is_embedded(name):
                    yield name, _size(dataset, index, name)


def _size(dataset: ChatDataset, index: int, name: str) -> int:
    if is_remote(name):
        return -2
    try:
        return media_size(dataset.records.locate(index, name))
    except VideoError:
        return -1
