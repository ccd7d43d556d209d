"""OpenFlamingo: interleaved pictures and text in the published form, `<image>...<|endofchunk|>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

IMAGE, END_OF_CHUNK = "<image>", "<|endofchunk|>"


class OpenFlamingoChats(ChatFamily):
    """`OpenFlamingoProcessor` and `open_flamingo.Flamingo`."""

    marks = (IMAGE, END_OF_CHUNK, VIDEO_MARK)
    ids_name = "lang_x"
    frame_names = ("vision_x",)
    model_class = "Flamingo"
    feature_weights = ("vision_encoder.", "perceiver.")

    def text(
        self,
        conversations: Sequence[Messages],
        shown: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        """Every sample has as many media as the one with most, one at least; those that pad are seen by no row."""
        chats = [with_pictures(messages, own) for messages, own in zip(conversations, shown, strict=True)]
        texts = [write(messages, add_generation_prompt) for messages in chats]
        spans = [answer_spans(messages, write) for messages in chats] if labels else None
        # the published models were trained on what the language models' tokenizers add by themselves
        ids, mask, targets = tokenise(self.tokenizer, texts, spans, padding_side=padding_side, add_special_tokens=True)
        counts = pictures_of(shown)
        check_pictures(ids, self.tokenizer.convert_tokens_to_ids(IMAGE), counts, IMAGE)
        return ChatText(input_ids=ids, attention_mask=mask, labels=targets, slots=padded_slots(counts, least=1))

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """(n, 1, 3, S, S): media of one frame."""
        if not len(frames):
            return (self.blank()[0][:0],)
        made = self.processor.image_processor(as_pictures(frames), return_tensors="pt")
        return (made["pixel_values"][:, None],)

    def blank(self) -> tuple[Tensor, ...]:
        """Zeros, as in the published training."""
        crop = self.processor.image_processor.crop_size
        return (torch.zeros(1, 1, 3, int(crop["height"]), int(crop["width"])),)

    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        """The tower's tokens through the perceiver."""
        return model.perceiver(model.vision_encoder(frames[0].flatten(0, 1))[1][None, :, None])[0]

    def shows_features(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        """As `vision_x` that is encoded already."""
        return {"vision_x": features, "visual_shard": shard}

    def generation(self, model: Any) -> dict[str, Any]:
        """No pictures in answers; the model itself ends them with the chunk."""
        image = self.tokenizer.convert_tokens_to_ids(IMAGE)
        return {"bad_words_ids": [[image]], "pad_token_id": self.tokenizer.pad_token_id}


def write(messages: Sequence[dict[str, Any]], open_answer: bool) -> str:
    """A chat in the form of the published evaluations.

    <image>Question:What is it? Short answer:A cat.<|endofchunk|>Question:Where? Short answer:At home.<|endofchunk|>
    <image>Output:A cat at home.<|endofchunk|>

    Args:
        messages: with content as parts, of type text or image. A message of pictures alone asks for a caption. A
            system message is plain text before the rest.
        open_answer: whether to end with the opening of an answer.
    """
    text, opening = "", ""
    for message in messages:
        asked = False
        if message["role"] == "assistant":
            text, opening = text + opening, ""
        for part in message["content"]:
            if part["type"] == "image":
                text += IMAGE
            else:
                text += "Question:" * (message["role"] == "user" and not asked) + part["text"]
                asked = True
        if message["role"] == "user":
            opening = " Short answer:" if asked else "Output:"
        elif message["role"] == "assistant":
            text += END_OF_CHUNK
    return text + opening * open_answer
