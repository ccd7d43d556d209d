"""What a family tells the scripts: how a chat is written, where pictures go, which masks, what forward takes.

Shape legend: B samples, L text tokens, N pictures of the model's flat list (padding pictures included), n of them at
hand.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.sharding import FrameShard

from .sources import FrameSource, ImageListSource

Message = Mapping[str, Any]
Messages = Sequence[Message]

VIDEO_MARK = "<|video|>"
"""Where in a question the video goes, if it says so; the same for all families."""


@dataclass(frozen=True, kw_only=True)
class ChatText:
    """Conversations as tokens, padded, and what else the model is told of them.

    Attributes:
        input_ids, attention_mask: (B, L).
        labels: (B, L), the assistant's words and their ends, -100 elsewhere; or None.
        slots: (N) the pictures that the model gets, in its order: numbers in the list of all that the conversations
            show, or -1 for a picture that only pads a sample.
        extras: masks and places of pictures, by the names that the model's forward has for them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor | None
    slots: Sequence[int]
    extras: Mapping[str, Tensor] = field(default_factory=dict)


class ChatFamily(ABC):
    """How one family's processor and model are used.

    Attributes:
        processor: of the model directory.
        marks: texts that a chat must not hold, since the family gives them a meaning.
        ids_name: what forward calls the token ids.
        frame_names: arguments that pictures come by, in the order of what `pixels` returns.
        model_class: name of the class of its models.
        feature_weights: how the names of the weights begin that make features of pictures.
        always_sharded: whether forward takes pictures as one flat list on one process too.
    """

    marks: tuple[str, ...] = ()
    ids_name = "input_ids"
    frame_names: tuple[str, ...] = ("pixel_values",)
    model_class: str
    feature_weights: tuple[str, ...]
    always_sharded = True

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    @property
    def tokenizer(self) -> Any:
        """The processor's."""
        return self.processor.tokenizer

    @abstractmethod
    def text(
        self,
        conversations: Sequence[Messages],
        shown: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        """Conversations as the model takes them; nothing is decoded, except to learn the size of a video.

        Args:
            conversations: messages, checked.
            shown: for each conversation, what its parts that show something show, in order.
            add_generation_prompt: ends with the beginning of an answer.
            labels: whether to make them.
            padding_side: the tokenizer's when None.

        Raises:
            DataError: pictures and the places for them do not match, or the tokenizer cannot do what is needed.
        """

    def check(self, model: Any) -> None:
        """Raises ConfigError for a model that is not one of this family's."""
        if not any(c.__name__ == self.model_class for c in type(model).__mro__):
            raise ConfigError(
                f"the model is {type(model).__name__}, and its directory has a {type(self.processor).__name__}, which "
                f"goes with {self.model_class}; put the model's own processor beside it"
            )

    @abstractmethod
    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Decoded frames (n, 3, H, W), uint8, of one size -> what the model takes, each (n, ...)."""

    @abstractmethod
    def blank(self) -> tuple[Tensor, ...]:
        """A picture that pads a sample, as `pixels` gives one, each (1, ...)."""

    @abstractmethod
    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        """What `pixels` gave, on the model's device -> features (n, tokens, width), without gradients of their own."""

    @abstractmethod
    def shows_features(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        """Arguments of the patched model's `generate` in place of pictures: this rank's features."""

    def arguments(self, text: ChatText) -> dict[str, Tensor]:
        """Arguments of forward and `generate` that say everything but the pictures."""
        given = {self.ids_name: text.input_ids, "attention_mask": text.attention_mask, **text.extras}
        return given if text.labels is None else given | {"labels": text.labels}

    def generation(self, model: Any) -> dict[str, Any]:
        """Arguments of `generate` that this family's prompts need: where an answer ends, for example."""
        return {}

    def still(self, path: str | os.PathLike[str]) -> FrameSource:
        """Return the frames of a still image: one, or as many as the family's processor cuts it into."""
        return ImageListSource([path])

    def facts_of_frames(self, source: FrameSource) -> dict[str, Any]:
        """What features on disk must say of their frames, so that prompts can be written without the video."""
        return {}

    def stored_frames(self, count: int, facts: Mapping[str, Any]) -> FrameSource:
        """Stands for the frames of features on disk: as many, with the same facts; not to be read."""
        return StoredFrames(count, None)


@dataclass(frozen=True)
class StoredFrames:
    """Frames of which only the number, and perhaps the size, is known."""

    count: int
    size: tuple[int, int] | None

    def __len__(self) -> int:
        return self.count

    def sizes(self) -> list[tuple[int, int]]:
        """(height, width) of each frame."""
        if self.size is None:
            raise DataError("the size of these frames is not known; encode the video again with --save-features")
        return [self.size] * self.count

    def read(self, start: int, stop: int, *, size: Any = None, batch: int = 16) -> Any:
        """Frames that are on disk as features cannot be seen again."""
        raise DataError("these frames are on disk as features only; give --video too")


def with_pictures(messages: Messages, shown: Sequence[FrameSource]) -> list[dict[str, Any]]:
    """The same messages with content as parts; each part that shows something is as many images as it has frames."""
    sources = iter(shown)
    made = []
    for message in messages:
        content = message["content"]
        parts: list[dict[str, Any]] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                parts.append({"type": "text", "text": part["text"]})
                continue
            source = next(sources, None)
            if source is None:
                raise DataError(f"the conversation shows more than the {len(shown)} videos and images that were given")
            parts += [{"type": "image"}] * len(source)
        made.append({"role": message["role"], "content": parts})
    if next(sources, None) is not None:
        raise DataError(f"{len(shown)} videos and images were given, and the conversation shows fewer")
    return made


def pictures_of(shown: Sequence[Sequence[FrameSource]]) -> list[int]:
    """Pictures of each conversation."""
    return [sum(len(source) for source in sources) for sources in shown]


def padded_slots(counts: Sequence[int], least: int = 0) -> list[int]:
    """`ChatText.slots` where every sample gets as many pictures as the one with most, and at least `least`."""
    most, first, slots = max([least, *counts]), 0, []
    for count in counts:
        slots += [*range(first, first + count), *[-1] * (most - count)]
        first += count
    return slots


def check_pictures(ids: Tensor, token: int | None, counts: Sequence[int], mark: str) -> None:
    """Raises DataError unless each sample has one token for each of its pictures."""
    found = (ids == token).sum(1).tolist() if token is not None else [0] * len(counts)
    for sample, (tokens, pictures) in enumerate(zip(found, counts, strict=True)):
        if tokens != pictures:
            raise DataError(
                f"sample {sample} has {pictures} pictures, but {tokens} tokens {mark} (id {token}) in its text; the "
                f"tokenizer must have {mark} as one special token, and the chat template must write it for each image"
            )


def as_pictures(frames: Tensor) -> list[Any]:
    """(n, 3, H, W) uint8 -> PIL images, which image processors of every backend take alike."""
    from PIL import Image

    return [Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames]


def joined(columns: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Several results of `pixels` as one."""
    return tuple(torch.cat(parts) for parts in zip(*columns, strict=True))
