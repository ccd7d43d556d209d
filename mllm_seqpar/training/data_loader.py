"""Micro-batches of a chat file; each rank decodes only its frame shard."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.comm.agreement import fingerprint
from mllm_seqpar.data.chat import ChatBatch, ChatDataset, load_local_pictures
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.errors import DataError
from mllm_seqpar.sharding import FrameShard, frame_range

from .arguments import TrainArguments
from .parallel_dims import ParallelDims


@dataclass(frozen=True)
class ShardedBatch:
    """One micro-batch of this rank's group: tokenized text, and frames that are not decoded yet.

    Attributes:
        chat: the text, the locations of the frames, and their numbers over the whole group.
        processor: the model's; its family defines the arguments of forward.
        dims: the grid of ranks; the ranks of a sequence parallel group share the frames.
    """

    chat: ChatBatch
    processor: Any
    dims: ParallelDims

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Decode this rank's frames and return the arguments of the model's forward, including labels, on `device`."""
        family = chat_family(self.processor)
        arguments: dict[str, Any] = family.arguments(self.chat.text)
        total = len(self.chat.text.slots)
        if total:
            local = frame_range(total, self.dims.sp_group)
            pictures = load_local_pictures(self.chat, local, family)
            arguments |= dict(zip(family.frame_names, pictures, strict=True))
            if self.dims.sp > 1 or family.always_sharded:
                arguments["visual_shard"] = FrameShard(local.start, local.stop, total)
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        return moved | {"use_cache": False}


class ShardedDataLoader:
    """The micro-batches of a chat file, for one rank.

    Attributes:
        digest: a hash of the file and of the names and sizes of its media files.
    """

    def __init__(self, dataset: ChatDataset, processor: Any, dims: ParallelDims) -> None:
        self._dataset = dataset
        self._processor = processor
        self._dims = dims
        media = (f"{name} {size}" for name, size in media_sizes(dataset.path))
        self.digest = f"{dataset.digest[:16]}-{fingerprint(chr(10).join(media)):016x}"

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, samples: Sequence[int]) -> ShardedBatch:
        """Return the samples with these numbers as one micro-batch, without decoding frames.

        Raises:
            DataError: if no sample has a target token, or a sample is too long.
            VideoError: if a video cannot be opened.
        """
        chat = self._dataset.batch(samples)
        if chat.targets == 0:
            lines = ", ".join(map(str, chat.lines))
            raise DataError(f"{self._dataset.path}, line {lines}: no target tokens; add a message of the assistant")
        return ShardedBatch(chat, self._processor, self._dims)


def media_sizes(path: str | os.PathLike[str]) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of each video and picture that a chat file names, in order; -1 if the file is missing."""
    folder = Path(path).parent
    for line in Path(path).read_bytes().splitlines():
        messages = json.loads(line).get("messages", ()) if line.strip() else ()
        parts = (part for message in messages if isinstance(message["content"], list) for part in message["content"])
        for part in parts:
            for name in part.get("images") or [part.get("path")]:
                if name:
                    file = folder / name
                    yield name, file.stat().st_size if file.is_file() else -1


def open_data_loader(path: str, processor: Any, args: TrainArguments, dims: ParallelDims) -> ShardedDataLoader:
    """Return the data loader of a chat file under a run's arguments.

    Raises:
        DataError: if the file is missing or malformed.
    """
    dataset = ChatDataset(path, processor, fps=args.fps, max_frames=args.max_frames, max_length=args.max_length)
    return ShardedDataLoader(dataset, processor, dims)
