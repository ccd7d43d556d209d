"""The dialogue format of IDEFICS' instructed models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.adapting import (
    VIDEO_MARK,
    FrameShard,
    FrameSource,
    ImageTokenFamily,
    image_counts,
    to_pil_images,
)

_IMAGE, _AROUND, _END = "<image>", "<fake_token_around_image>", "<end_of_utterance>"


class IdeficsChats(ImageTokenFamily):
    """`IdeficsProcessor` and `IdeficsForVisionText2Text`, with and without resampler."""

    processors = ("IdeficsProcessor",)
    marks = (_IMAGE, _AROUND, _END, VIDEO_MARK)
    feature_weights = ("model.vision_model.", "model.perceiver_resampler.", "vision_model.", "perceiver_resampler.")
    image_token = _IMAGE
    min_images = 1  # the model requires images, also for text without any
    repeats_media = True

    def appends_media(self, model: Any) -> bool:
        return True

    def masks(self, ids: Tensor, media: Sequence[Sequence[FrameSource]]) -> dict[str, Tensor]:
        """Return `image_attention_mask` (B, L, images of a sample), bool: a row attends to the last image before it."""
        image, most = self.tokenizer.convert_tokens_to_ids(_IMAGE), max(1, *image_counts(media))
        return {"image_attention_mask": image_mask(ids, image, self.tokenizer.eos_token_id, most)}

    def write(self, messages: Sequence[dict[str, Any]], open_answer: bool) -> str:
        items = prompt_items(messages, open_answer, _END if _END in self.tokenizer.get_vocab() else "")
        text, after_image = self.tokenizer.bos_token or "", False
        for item in items:
            if item is None:
                text += _IMAGE + _AROUND if after_image else _AROUND + _IMAGE + _AROUND
            else:
                text += item.strip(" ")
            after_image = item is None
        return text

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Return (n, 3, S, S)."""
        return (torch.as_tensor(self.processor.image_processor(to_pil_images(frames), return_tensors="pt")),)

    def blank(self) -> tuple[Tensor, ...]:
        """Return zeros, which differ from a black image after normalisation."""
        return (torch.zeros(1, *self.processor.default_image_dims),)

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        name = "perceiver_embeddings" if model.config.use_resampler else "image_encoder_embeddings"
        return {name: features, "visual_shard": shard}

    def generation(self, model: Any) -> dict[str, Any]:
        """End answers at the end of the utterance too, and generate no image tokens."""
        vocabulary = self.tokenizer.get_vocab()
        ends = [self.tokenizer.eos_token_id, *([vocabulary[_END]] if _END in vocabulary else [])]
        return {
            "eos_token_id": [end for end in ends if end is not None],
            "bad_words_ids": [[vocabulary[mark]] for mark in (_IMAGE, _AROUND) if mark in vocabulary],
        }


def prompt_items(messages: Sequence[dict[str, Any]], open_answer: bool, end: str) -> list[str | None]:
    """Return a dialogue in the form that `IdeficsProcessor` takes: texts, and None for each image.

    User:<image>What is it?<end_of_utterance>
    Assistant: A cat.<end_of_utterance>

    Args:
        messages: with contents as parts of type text or image. A system message is plain text before the dialogue.
        open_answer: end with the beginning of an answer.
        end: the mark that ends an utterance; empty for tokenizers that do not have it.
    """
    items: list[str | None] = []
    for number, message in enumerate(messages):
        line = "\n" * bool(number) + {"user": "User:", "assistant": "Assistant:"}.get(message["role"], "")
        for part in message["content"]:
            if part["type"] == "text":
                line += " " * line.endswith(("User:", "Assistant:")) + part["text"]
            else:
                items += [line, None] if line else [None]
                line = ""
        items.append(line + end * (message["role"] != "system"))
    return [*items, "\nAssistant:"] if open_answer else items


def image_mask(ids: Tensor, image: int, end_of_document: int | None, images: int) -> Tensor:
    """Return (B, L, images) bool: a row attends to the last image at or before it, within the same document."""
    position = torch.arange(ids.shape[1])[None].expand_as(ids)
    is_image, is_end = ids.eq(image), ids.eq(-1 if end_of_document is None else end_of_document)
    last_image = position.masked_fill(~is_image, -1).cummax(1).values
    # The end token itself still belongs to its document.
    last_end = F.pad(position.masked_fill(~is_end, -1).cummax(1).values, (1, 0), value=-1)[:, :-1]
    visible = F.one_hot((is_image.cumsum(1) - 1).clamp(min=0), images).bool()
    return visible & (last_image > last_end)[..., None]
