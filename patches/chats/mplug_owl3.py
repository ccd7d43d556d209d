"""The chat format of mPLUG-Owl3, with still images whole or cut into tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.adapting import (
    AdapterError,
    ChatFamily,
    ChatText,
    ConfigError,
    DataError,
    FrameShard,
    FrameSource,
    ImageListSource,
    Messages,
    check_range,
    media_of,
)

_ENDS = ("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True)
class CutImageSource(FrameSource):
    """The tiles of a still image as frames: the grid row by row, then the whole image.

    Attributes:
        image: the image.
        grid: (rows, columns).
        image_processor: cuts the image into tiles of its own image size, which need no further resizing.
    """

    image: ImageListSource
    grid: tuple[int, int]
    image_processor: Any = field(compare=False)

    def __len__(self) -> int:
        return self.grid[0] * self.grid[1] + 1

    def sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of each tile."""
        return [(self.image_processor.image_size,) * 2] * len(self)

    @property
    def name(self) -> str:
        return self.image.name

    def key(self) -> str:
        return f"{self.image.key()} {self.grid}"

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Yield tiles start <= i < stop, as uint8 tensors (at most `batch`, 3, S, S)."""
        check_range(start, stop, len(self), batch)
        if size not in (None, self.sizes()[0]):
            raise ConfigError(f"size is {size}; tiles of an image are {self.sizes()[0]}: leave size out")
        if start < stop:
            (image,) = next(self.image.read(0, 1))
            yield from self.image_processor.tiles(image, self.grid)[start:stop].split(batch)


class MPlugOwl3Chats(ChatFamily):
    """The chat format of `MPlugOwl3Processor`, whose `encode` tokenizes chats without their frames; of models with
    `encode_frames`."""

    processors = ("MPlugOwl3Processor",)
    marks = ("<|image|>", "<|video|>", "<|im_start|>", "<|im_end|>")
    feature_weights = ("vision_model.", "vision2text_model.")
    tower = ("vision_model", "penultimate")
    always_sharded = False

    def appends_media(self, model: Any) -> bool:
        return True

    def text(
        self,
        conversations: Sequence[Messages],
        media: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        """Tokenize conversations by the processor's `encode`; `media_offset` is among the extras."""
        pairs = [
            pair for messages, sources in zip(conversations, media, strict=True) for pair in media_of(messages, sources)
        ]
        images = [source for kind, source in pairs if kind == "image"]
        grids = [getattr(source, "grid", None) for source in images]  # None for an image that is one frame
        for source, grid in zip(images, grids, strict=True):
            if grid is None and len(source) != 1:
                raise DataError(f"an image was given {len(source)} frames; pass one image, or show several as a video")
        encoded = self.processor.encode(
            conversations,
            frames_per_video=[len(source) for kind, source in pairs if kind == "video"],
            **({"image_grids": grids} if grids else {}),
            add_generation_prompt=add_generation_prompt,
            return_labels=labels,
            padding_side=padding_side,
        )
        return ChatText(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            labels=encoded["labels"] if labels else None,
            slots=range(sum(len(source) for sources in media for source in sources)),
            extras={"media_offset": encoded["media_offset"]},
        )

    def check(self, model: Any) -> None:
        """Raise AdapterError for a model that cannot encode frames."""
        if not hasattr(model, "encode_frames"):
            raise AdapterError(
                f"{type(model).__name__} with a {type(self.processor).__name__}: it has no method encode_frames, so "
                "frames cannot be encoded; if it is of another family, copy the processor files of that family into "
                "the model directory"
            )

    def arguments(self, text: ChatText) -> dict[str, Tensor]:
        """Return the text arguments, without `media_offset` if there are no frames."""
        arguments = super().arguments(text)
        if not text.slots:
            del arguments["media_offset"]
        return arguments

    def still_frames(self, image: ImageListSource) -> FrameSource:
        if not getattr(self.processor, "cut_enable", False):
            return image
        (size,) = image.sizes()
        return CutImageSource(image, self.processor.image_grid(*size), self.processor.image_processor)

    def generation(self, model: Any) -> dict[str, Any]:
        """Return the tokens that end an answer as published, and the padding token 0."""
        vocabulary = self.tokenizer.get_vocab()
        ends = [vocabulary[mark] for mark in _ENDS if mark in vocabulary]
        return {"eos_token_id": ends, "pad_token_id": 0} if ends else {}

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Return (n, 3, S, S)."""
        return (self.processor.image_processor(frames)["pixel_values"],)

    def blank(self) -> tuple[Tensor, ...]:
        """Return a black image."""
        return self.pixels(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))

    def tower_states(self, output: Tensor) -> Tensor:
        return output

    def tower_output(self, states: Tensor) -> Tensor:
        return states

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        return {"image_embeds": features, "visual_shard": shard}
