"""Micro-batches of conversations about videos and images, of which each rank decodes only its own frames.

Before any frame is decoded, every rank has the number of frames of a micro-batch. The frames of all samples form one
flat list in the order of the placeholders in the text. A rank decodes its range of that list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import DataError, LengthError, VideoError
from mllm_seqpar.sharding import FrameShard, join_spans

from .chat import Chat
from .chat_family import ChatFamily, ChatText, chat_family
from .clip import FrameSource, ranges_by_source


class MediaError(VideoError):
    """The media of one sample of a batch cannot be read.

    Attributes:
        sample: the number of the sample in its batch.
    """

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample


@dataclass(frozen=True)
class ChatSample:
    """One conversation with the source of each medium; nothing is decoded.

    Attributes:
        place: the place of its record, for messages; FILE:LINE of JSONL.
    """

    place: str
    chat: Chat
    sources: tuple[FrameSource, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.chat.to_json()

    @property
    def frames(self) -> int:
        return sum(len(source) for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class ChatBatch:
    """A micro-batch: padded text, and the sources of its frames. `training.batches` adds what one rank has of it.

    Attributes:
        text: tokens and labels (B, L); labels are -100 except at the answers and their ends.
        sources: the sources of all samples, in the order of the flat list of frames.
        places: the places of the samples, for messages; FILE:LINE of JSONL.
        owners: for each source, the number of its sample in the batch.
        samples: numbers of the samples in their data set, replacements included.
        shard: the images of `text.slots` that this rank has.
        arguments: once these are decoded, the arguments of the model's forward, on the CPU; with stored outputs of the
            vision tower, also a `TowerRows`.
    """

    text: ChatText
    sources: tuple[FrameSource, ...]
    places: tuple[str, ...]
    owners: tuple[int, ...]
    samples: tuple[int, ...] = ()
    shard: FrameShard | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> ChatBatch:
        """The batch itself, by the name that it had in a `MicroBatch`."""
        return self

    @property
    def frames(self) -> int:
        """Length of the flat list of frames."""
        return sum(len(source) for source in self.sources)

    @property
    def input_ids(self) -> Tensor:
        return self.text.input_ids

    @property
    def attention_mask(self) -> Tensor:
        return self.text.attention_mask

    @property
    def labels(self) -> Tensor:
        assert self.text.labels is not None  # `collate` asks for labels
        return self.text.labels

    @property
    def targets(self) -> int:
        """Number of tokens that the loss counts."""
        return int((self.labels[:, 1:] != -100).sum())

    @property
    def tokens(self) -> int:
        """Number of text tokens without padding."""
        return int(self.attention_mask.sum())


def collate(
    samples: Sequence[ChatSample], processor: Any, max_length: int | None = None, context: int | None = None
) -> ChatBatch:
    """Return the samples, at least one, as one micro-batch, padded on the right.

    Raises:
        DataError: a sample has more than `max_length` tokens, or the chat format cannot tokenize it; names its place.
        LengthError: a sample has more tokens than `context`, the context of the model.
        MediaError: the size of a video is needed and cannot be read.
    """
    chat_format = chat_family(processor)
    try:
        text = chat_format.text(
            [sample.messages for sample in samples],
            [sample.sources for sample in samples],
            labels=True,
            padding_side="right",
        )
    except DataError as error:
        raise DataError(f"{', '.join(sample.place for sample in samples)}: {error}") from error
    except VideoError as error:  # a chat format may decode one frame to find the size of a video
        if len(samples) == 1:
            raise MediaError(f"{samples[0].place}: {error}", 0) from error
        for number, sample in enumerate(samples):
            try:
                collate([sample], processor)
            except MediaError as found:
                raise MediaError(str(found), number) from error
        raise
    for sample, length in zip(samples, text.attention_mask.sum(1).tolist(), strict=True):
        if max_length is not None and length > max_length:
            raise DataError(
                f"{sample.place}: {length} tokens ({sample.frames} of them are placeholders of frames), more than "
                f"max_length = {max_length}; raise it, or use fewer frames"
            )
        if context is not None and length > context:
            raise LengthError(
                f"{sample.place}: {length} tokens ({sample.frames} of them are placeholders of frames), more than the "
                f"{context} of the model's context; use fewer frames, or shorten the text"
            )
    return ChatBatch(
        text=text,
        sources=tuple(chat_format.frame_groups(source) for sample in samples for source in sample.sources),
        places=tuple(sample.place for sample in samples),
        owners=tuple(number for number, sample in enumerate(samples) for _ in sample.sources),
    )


def load_local_images(
    batch: ChatBatch, slots: range | Sequence[range], chat_format: ChatFamily, *, at_once: int = 32
) -> tuple[Tensor, ...]:
    """Decode this rank's images of the model's flat list; return tensors (slots, ...) as `chat_format.pixels` does.

    `slots` is this rank's range of `batch.text.slots`, `frame_range(len(batch.text.slots), group)`, or its
    `frame_ranges`. Padding images among them are not decoded; at most `at_once` decoded frames are held in addition
    to the result.
    """
    ranges = [slots] if isinstance(slots, range) else slots
    numbers = [batch.text.slots[slot] for slot in chain(*ranges)]
    frames = [range(*span) for span in join_spans((number, number + 1) for number in numbers if number >= 0)]
    if chat_format.ragged:  # none of them pads
        return chat_format.joined([chat_format.pixels(decoded) for decoded in _decode(batch, frames, at_once)])
    real = torch.tensor([index for index, number in enumerate(numbers) if number >= 0], dtype=torch.long)
    if not len(real):
        return tuple(x.repeat(len(numbers), *[1] * (x.dim() - 1)) for x in chat_format.blank())
    pixels: tuple[Tensor, ...] = ()
    done = 0
    for decoded in _decode(batch, frames, at_once):
        part = chat_format.pixels(decoded)
        if not pixels:
            pixels = tuple(x.new_empty(len(numbers), *x.shape[1:]) for x in part)
            if len(real) < len(numbers):
                for target, x in zip(pixels, chat_format.blank(), strict=True):
                    target[:] = x
        positions = real[done : done + len(decoded)]
        for target, x in zip(pixels, part, strict=True):
            target[positions] = x
        done += len(decoded)
    return pixels


def _decode(batch: ChatBatch, frames: Sequence[range], at_once: int) -> Iterator[Tensor]:
    """Yield ranges of a batch's frames as uint8 tensors (at most `at_once`, 3, H, W), each of one size.

    Raises:
        MediaError: a frame cannot be decoded; names the place of its sample.
    """
    for source, place, ranges in ranges_by_source(batch.sources, frames):
        owner = batch.owners[place]
        try:
            yield from source.read_ranges(ranges, batch=at_once)
        except VideoError as error:
            raise MediaError(f"{batch.places[owner]}: {error}", owner) from error
