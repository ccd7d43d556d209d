"""IDEFICS: dialogues as its instructed models were trained on them, and its mask of images by text token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.data.chat_family import (
    VIDEO_MARK,
    ChatFamily,
    ChatText,
    Messages,
    as_pictures,
    check_pictures,
    padded_slots,
    pictures_of,
    with_pictures,
)
from mllm_seqpar.data.chat_tokens import answer_spans, tokenise
from mllm_seqpar.data.sources import FrameSource
from mllm_seqpar.sharding import FrameShard

IMAGE, AROUND, END = "<image>", "<fake_token_around_image>", "<end_of_utterance>"


class IdeficsChats(ChatFamily):
    """`IdeficsProcessor` and `IdeficsForVisionText2Text`, with and without resampler."""

    marks = (IMAGE, AROUND, END, VIDEO_MARK)
    model_class = "IdeficsForVisionText2Text"
    feature_weights = (
        *("model.vision_model.", "model.perceiver_resampler."),
        *("vision_model.", "perceiver_resampler."),
    )

    def text(
        self,
        conversations: Sequence[Messages],
        shown: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        """With `image_attention_mask` (B, L, pictures of a sample), bool: a row sees the picture before it."""
        chats = [with_pictures(messages, own) for messages, own in zip(conversations, shown, strict=True)]
        texts = [self.write(messages, add_generation_prompt) for messages in chats]
        spans = [answer_spans(messages, self.write) for messages in chats] if labels else None
        ids, mask, targets = tokenise(self.tokenizer, texts, spans, padding_side=padding_side)
        counts = pictures_of(shown)
        image = self.tokenizer.convert_tokens_to_ids(IMAGE)
        check_pictures(ids, image, counts, IMAGE)
        seen = image_mask(ids, image, self.tokenizer.eos_token_id, max(1, *counts))
        return ChatText(
            input_ids=ids,
            attention_mask=mask,
            labels=targets,
            slots=padded_slots(counts, least=1),  # the model wants pictures even where nothing is shown
            extras={"image_attention_mask": seen},
        )

    def write(self, messages: Sequence[dict[str, Any]], open_answer: bool) -> str:
        """The text of a dialogue."""
        items = prompt_items(messages, open_answer, END if END in self.tokenizer.get_vocab() else "")
        text, after_image = self.tokenizer.bos_token or "", False
        for item in items:
            if item is None:
                text += IMAGE + AROUND if after_image else AROUND + IMAGE + AROUND
            else:
                text += item.strip(" ")
            after_image = item is None
        return text

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """(n, 3, S, S)."""
        if not len(frames):
            return (self.blank()[0][:0],)
        return (torch.as_tensor(self.processor.image_processor(as_pictures(frames), return_tensors="pt")),)

    def blank(self) -> tuple[Tensor, ...]:
        """Zeros, which are no black picture once values are normalised."""
        return (torch.zeros(1, *self.processor.default_image_dims),)

    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        """The tower's tokens, resampled where the model does that."""
        decoder = model.model
        states = decoder.vision_model(pixel_values=frames[0], interpolate_pos_encoding=False).last_hidden_state
        return decoder.perceiver_resampler(states) if model.config.use_resampler else states

    def shows_features(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        """As what they are: the resampler's latents or the tower's tokens."""
        name = "perceiver_embeddings" if model.config.use_resampler else "image_encoder_embeddings"
        return {name: features, "visual_shard": shard}

    def generation(self, model: Any) -> dict[str, Any]:
        """An answer ends with the utterance too, and has no pictures."""
        vocabulary = self.tokenizer.get_vocab()
        ends = [self.tokenizer.eos_token_id, *([vocabulary[END]] if END in vocabulary else [])]
        return {
            "eos_token_id": [end for end in ends if end is not None],
            "bad_words_ids": [[vocabulary[mark]] for mark in (IMAGE, AROUND) if mark in vocabulary],
        }


def prompt_items(messages: Sequence[dict[str, Any]], open_answer: bool, end: str) -> list[str | None]:
    """A dialogue as `IdeficsProcessor` takes it: texts, and None for each picture.

    User:<picture>What is it?<end_of_utterance>
    Assistant: A cat.<end_of_utterance>

    Args:
        messages: with content as parts, of type text or image. A system message is plain text before the dialogue.
        open_answer: whether to end with the opening of an answer.
        end: of an utterance; empty for tokenizers that do not know it.
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


def image_mask(ids: Tensor, image: int, end_of_document: int | None, pictures: int) -> Tensor:
    """(B, L, pictures) bool: each row sees the last picture at or before it, unless a document ended in between."""
    place = torch.arange(ids.shape[1])[None].expand_as(ids)
    shows, ends = ids.eq(image), ids.eq(-1 if end_of_document is None else end_of_document)
    last_shown = place.masked_fill(~shows, -1).cummax(1).values
    # a row that is the end itself still belongs to its document
    last_end = F.pad(place.masked_fill(~ends, -1).cummax(1).values, (1, 0), value=-1)[:, :-1]
    seen = F.one_hot((shows.cumsum(1) - 1).clamp(min=0), pictures).bool()
    return seen & (last_shown > last_end)[..., None]
