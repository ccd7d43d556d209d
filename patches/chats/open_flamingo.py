"""The chat format of OpenFlamingo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.adapting import (
    VIDEO_MARK,
    FrameShard,
    ImageTokenFamily,
    to_pil_images,
)
from mllm_seqpar.patches.open_flamingo import Media, cross_attentions

_IMAGE, _END_OF_CHUNK = "<image>", "<|endofchunk|>"


class OpenFlamingoChats(ImageTokenFamily):
    """`OpenFlamingoProcessor` and `open_flamingo.Flamingo`."""

    processors = ("OpenFlamingoProcessor",)
    marks = (_IMAGE, _END_OF_CHUNK, VIDEO_MARK)
    ids_name = "lang_x"
    frame_names = ("vision_x",)
    feature_weights = ("vision_encoder.", "perceiver.")
    tower = ("vision_encoder", "forward")
    image_token = _IMAGE
    min_images = 1
    repeats_media = True

    def appends_media(self, model: Any) -> bool:
        """Return whether a token attends to the last medium only; otherwise those before the first attend to all."""
        return all(attention.only_attend_immediate_media for _, attention in cross_attentions(model.lang_encoder))

    def needs_special_tokens(self, texts: Sequence[str]) -> bool:
        """Return True: the published models were trained with the special tokens that their tokenizers add."""
        return True

    def write(self, messages: Sequence[dict[str, Any]], open_answer: bool) -> str:
        return self.processor.apply_chat_template(messages, add_generation_prompt=open_answer) if messages else ""

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Return (n, 1, 3, S, S): media of one frame each."""
        processed = self.processor.image_processor(to_pil_images(frames), return_tensors="pt")
        return (processed["pixel_values"][:, None],)

    def blank(self) -> tuple[Tensor, ...]:
        """Return zeros, as in the published training."""
        crop = self.processor.image_processor.crop_size
        return (torch.zeros(1, 1, 3, int(crop["height"]), int(crop["width"])),)

    def tower_states(self, output: tuple[Any, Tensor]) -> Tensor:
        return output[1]

    def tower_output(self, states: Tensor) -> tuple[None, Tensor]:
        return None, states

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        return {"vision_x": Media.of(features, shard, 1)}

    def generation(self, model: Any) -> dict[str, Any]:
        """Generate no image tokens. The model itself ends an answer at the end of the chunk."""
        image = self.tokenizer.convert_tokens_to_ids(_IMAGE)
        return {"bad_words_ids": [[image]], "pad_token_id": self.tokenizer.pad_token_id}
