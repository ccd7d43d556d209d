"""mPLUG-Owl3, and any model whose processor has the same interface: `encode` tokenizes chats without their frames."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.adapting import AdapterError, ConfigError, DataError, FrameShard
from mllm_seqpar.adapting.chat import (
    ChatFamily,
    ChatText,
    FrameSource,
    ImageListSource,
    Messages,
    PictureSource,
    check_range,
    media_parts,
)
from mllm_seqpar.families import family_specs

_ENDS = ("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True)
class CutImageSource:
    """The tiles of a still image as frames: the grid row by row, then the whole image.

    Attributes:
        picture: the image.
        grid: (rows, columns).
        image_processor: cuts the image into tiles of its own image size, which need no further resizing.
    """

    picture: ImageListSource | PictureSource
    grid: tuple[int, int]
    image_processor: Any = field(compare=False)

    def __len__(self) -> int:
        return self.grid[0] * self.grid[1] + 1

    def sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of each tile."""
        return [(self.image_processor.image_size,) * 2] * len(self)

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Yield tiles start <= i < stop, as uint8 tensors (at most `batch`, 3, S, S)."""
        check_range(start, stop, len(self), batch)
        if size not in (None, self.sizes()[0]):
            raise ConfigError(f"size is {size}; tiles of an image are {self.sizes()[0]}: leave size out")
        if start < stop:
            (picture,) = next(self.picture.read(0, 1))
            yield from self.image_processor.tiles(picture, self.grid)[start:stop].split(batch)


class MPlugOwl3Chats(ChatFamily):
    """Processors with `encode` and an `image_processor` for decoded frames; models with `encode_frames`."""

    frame_layout = "zigzag"
    marks = ("<|image|>", "<|video|>", "<|im_start|>", "<|im_end|>")
    model_class = "MPlugOwl3ForConditionalGeneration"
    feature_weights = ("vision_model.", "vision2text_model.")
    tower = ("vision_model", "penultimate")
    always_sharded = False

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
        if not hasattr(self.processor, "encode"):
            known = ", ".join(name for spec in family_specs() for name in spec.processors)
            raise DataError(
                f"{type(self.processor).__name__} is not the processor of a known model family; expected one of "
                f"{known} in the model directory (processor_config.json or preprocessor_config.json, and a tokenizer)"
            )
        pairs = [
            (part["type"], source)
            for messages, sources in zip(conversations, media, strict=True)
            for part, source in zip(media_parts(messages), sources, strict=False)  # `encode` checks the counts
        ]
        grids = [_grid(source) for kind, source in pairs if kind == "image"]
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

    def still_frames(self, picture: ImageListSource | PictureSource) -> FrameSource:
        if not getattr(self.processor, "cut_enable", False):
            return picture
        (size,) = picture.sizes()
        return CutImageSource(picture, self.processor.image_grid(*size), self.processor.image_processor)

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

    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        return model.encode_frames(*frames)

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        return {"image_embeds": features, "visual_shard": shard}


chat_family = MPlugOwl3Chats


def _grid(source: FrameSource) -> tuple[int, int] | None:
    """Return the grid that an image is cut into, or None for an image that is one frame."""
    grid = getattr(source, "grid", None)
    if grid is None and len(source) != 1:
        raise DataError(f"an image was given {len(source)} frames; pass one image, or show several as a video")
    return grid
