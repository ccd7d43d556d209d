"""mPLUG-Owl3, and any model with a processor like its own: one that encodes chats whose frames are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import AdapterError, DataError
from ...sharding import FrameShard
from ..sources import FrameSource
from .base import ChatFamily, ChatText, Messages


class NativeChats(ChatFamily):
    """Processors with `encode` and an `image_processor` that takes decoded frames; models with `encode_frames`."""

    marks = ("<|image|>", "<|video|>", "<|im_start|>", "<|im_end|>")
    model_class = "MPlugOwl3ForConditionalGeneration"
    feature_weights = ("vision_model.", "vision2text_model.")
    always_sharded = False

    def text(
        self,
        conversations: Sequence[Messages],
        shown: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        """What the processor's `encode` gives, `media_offset` among it."""
        if not hasattr(self.processor, "encode"):
            raise DataError(
                f"{type(self.processor).__name__} is no processor of a family that is known here; the model directory "
                "needs one of mPLUG-Owl3, IDEFICS, Llama 3.2 Vision (processor_config.json or "
                "preprocessor_config.json, and a tokenizer) or OpenFlamingo"
            )
        encoded = self.processor.encode(
            conversations,
            frames_per_video=[
                len(source)
                for messages, sources in zip(conversations, shown, strict=True)
                for kind, source in zip(_kinds(messages), sources, strict=False)  # `encode` counts
                if kind == "video"
            ],
            add_generation_prompt=add_generation_prompt,
            return_labels=labels,
            padding_side=padding_side,
        )
        return ChatText(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            labels=encoded["labels"] if labels else None,
            slots=range(sum(len(source) for sources in shown for source in sources)),
            extras={"media_offset": encoded["media_offset"]},
        )

    def check(self, model: Any) -> None:
        """Raises AdapterError for a model that cannot encode frames."""
        if not hasattr(model, "encode_frames"):
            raise AdapterError(
                f"{type(model).__name__} with a {type(self.processor).__name__}: it has no method encode_frames, so "
                "frames cannot be encoded; if it is of another family, put that family's processor beside it"
            )

    def arguments(self, text: ChatText) -> dict[str, Tensor]:
        """Without the places of pictures when there are none."""
        given = super().arguments(text)
        if not text.slots:
            del given["media_offset"]
        return given

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """(n, 3, S, S)."""
        return (self.processor.image_processor(frames)["pixel_values"],)

    def blank(self) -> tuple[Tensor, ...]:
        """A black picture."""
        return self.pixels(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))

    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        """The model's own."""
        return model.encode_frames(*frames)

    def shows_features(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        """As `image_embeds`."""
        return {"image_embeds": features, "visual_shard": shard}


def _kinds(messages: Messages) -> list[str]:
    return [
        part["type"]
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] != "text"
    ]
