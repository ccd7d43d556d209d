"""The chat format of MOSS-Video-Preview: that of Llama 3.2 Vision, with frames of one tile that have positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mllm_seqpar.adapting import ChatText, FrameShard, FrameSource, Messages, image_counts, to_pil_images

from .mllama import MllamaChats


class VideoMllamaChats(MllamaChats):
    """`VideoMllamaProcessor` and `VideoMllamaForConditionalGeneration`; a video has an image token for each frame."""

    processors = ("VideoMllamaProcessor",)
    feature_weights = (*MllamaChats.feature_weights, "model.patch_merger.", "patch_merger.")

    def masks(self, ids: Tensor, media: Sequence[Sequence[FrameSource]]) -> dict[str, Tensor]:
        return {}  # `text` makes them, which knows the padding

    def text(
        self, conversations: Sequence[Messages], media: Sequence[Sequence[FrameSource]], **options: Any
    ) -> ChatText:
        """Tokenize conversations; the mask and the positions of frames are among the extras."""
        text = super().text(conversations, media, **options)
        frames = max(image_counts(media), default=0)
        return replace(text, extras=self.processor.frame_arguments(text.input_ids, text.attention_mask, frames))

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Return frames (n, 1, 3, S, S), aspect ratio ids (n,) and aspect ratio mask (n, 1)."""
        processed: tuple[Tensor, ...] = self.processor.pixels(to_pil_images(frames))
        return processed

    def blank(self) -> tuple[Tensor, ...]:
        blank: tuple[Tensor, ...] = self.processor.blank()
        return blank

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        return {"cross_attention_states": features, "visual_shard": shard}
