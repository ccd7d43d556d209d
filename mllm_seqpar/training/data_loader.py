"""What the model is fed: micro-batches of a chat file, of whose frames a rank decodes its own and no other."""

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
from mllm_seqpar.integrations.accelerate.launch import Layout
from mllm_seqpar.sharding import FrameShard, frame_range

from .arguments import TrainArguments


@dataclass(frozen=True)
class ShardedBatch:
    """One micro-batch of this rank's group: text known, frames still in their files.

    Attributes:
        chat: text, and where the frames are.
        processor: of the model; its family says what forward takes.
        layout: of the ranks; those of one sequence parallel group share the frames.
    """

    chat: ChatBatch
    processor: Any
    layout: Layout

    @property
    def targets(self) -> int:
        """Tokens that the loss counts."""
        return self.chat.targets

    @property
    def tokens(self) -> int:
        """Tokens of text, placeholders among them."""
        return self.chat.tokens

    @property
    def frames(self) -> int:
        """Frames of the whole group."""
        return self.chat.frames

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments of the model's forward; decodes this rank's frames. See `mllm_seqpar.training.step.Batch`."""
        family = chat_family(self.processor)
        arguments: dict[str, Any] = family.arguments(self.chat.text)
        total = len(self.chat.text.slots)
        if total:
            own = frame_range(total, self.layout.sp_group)
            pictures = load_local_pictures(self.chat, own, family)
            arguments |= dict(zip(family.frame_names, pictures, strict=True))
            if self.layout.sp > 1 or family.always_sharded:
                arguments["visual_shard"] = FrameShard(own.start, own.stop, total)
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        return moved | {"use_cache": False}


class ShardedDataLoader:
    """The micro-batches of a chat file, for one rank.

    Attributes:
        digest: of the file's content and of the names and sizes of the media it names.
    """

    def __init__(self, dataset: ChatDataset, processor: Any, layout: Layout) -> None:
        self._dataset = dataset
        self._processor = processor
        self._layout = layout
        media = (f"{name} {size}" for name, size in media_sizes(dataset.path))
        self.digest = f"{dataset.digest[:16]}-{fingerprint(chr(10).join(media)):016x}"

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, samples: Sequence[int]) -> ShardedBatch:
        """The samples with these numbers as one micro-batch; decodes nothing.

        Raises:
            DataError: a sample that teaches nothing, or that is too long.
            VideoError: a video that cannot be opened.
        """
        chat = self._dataset.batch(samples)
        if chat.targets == 0:
            lines = ", ".join(map(str, chat.lines))
            raise DataError(f"{self._dataset.path}, line {lines}: no token to learn; the assistant must say something")
        return ShardedBatch(chat, self._processor, self._layout)


def media_sizes(path: str | os.PathLike[str]) -> Iterator[tuple[str, int]]:
    """(name, bytes) of each video and picture that a chat file names, in order; -1 for a missing one."""
    folder = Path(path).parent
    for line in Path(path).read_bytes().splitlines():
        messages = json.loads(line).get("messages", ()) if line.strip() else ()
        parts = (part for message in messages if isinstance(message["content"], list) for part in message["content"])
        for part in parts:
            for name in part.get("images") or [part.get("path")]:
                if name:
                    file = folder / name
                    yield name, file.stat().st_size if file.is_file() else -1


def open_data_loader(path: str, processor: Any, args: TrainArguments, layout: Layout) -> ShardedDataLoader:
    """The feed of a chat file under a run's arguments.

    Raises:
        DataError: the file is missing or malformed.
    """
    dataset = ChatDataset(path, processor, fps=args.fps, max_frames=args.max_frames, max_length=args.max_length)
    return ShardedDataLoader(dataset, processor, layout)
