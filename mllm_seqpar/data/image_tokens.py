"""Chat formats in which one special token of the text stands for each image.

The text of a conversation is written and tokenized as a whole, as the families' processors do it. Appending a message
only appends text, so an answer is the text between the conversation that opens it and the conversation that ends with
it. The labels are the tokens whose character offsets lie in such a span.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import DataError
from mllm_seqpar.models.processor import target_mask

from .chat_family import ChatFamily, ChatText, Messages
from .chat_format import media_of
from .sources import FrameSource

Span = tuple[int, int]


class ImageTokenFamily(ChatFamily):
    """A chat format with one special token for each image; every sample is padded to the same number of images."""

    min_images = 0
    """The minimum number of images per sample, padding included."""

    @property
    @abstractmethod
    def image_token(self) -> str: ...

    @abstractmethod
    def write(self, messages: Sequence[dict[str, Any]], open_answer: bool) -> str:
        """Return the text of a conversation whose contents are parts of type text or image.

        With `open_answer`, it ends with the beginning of an answer.
        """

    def needs_special_tokens(self, texts: Sequence[str]) -> bool:
        """Return whether the tokenizer must add its own special tokens, such as the one that begins a text."""
        return False

    def masks(self, ids: Tensor, media: Sequence[Sequence[FrameSource]]) -> dict[str, Tensor]:
        """Return the model's masks of images for token ids (B, L)."""
        return {}

    def text(
        self,
        conversations: Sequence[Messages],
        media: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        chats = [expand_media(messages, sources) for messages, sources in zip(conversations, media, strict=True)]
        texts = [self.write(messages, add_generation_prompt) for messages in chats]
        spans = [answer_spans(messages, self.write) for messages in chats] if labels else None
        ids, mask, targets = tokenize(
            self.tokenizer,
            texts,
            spans,
            padding_side=padding_side,
            add_special_tokens=self.needs_special_tokens(texts),
        )
        counts = image_counts(media)
        self._check_image_tokens(ids, counts)
        most, first, slots = max([self.min_images, *counts]), 0, []
        for count in counts:
            slots += [*range(first, first + count), *[-1] * (most - count)]
            first += count
        return ChatText(input_ids=ids, attention_mask=mask, labels=targets, slots=slots, extras=self.masks(ids, media))

    def _check_image_tokens(self, ids: Tensor, counts: Sequence[int]) -> None:
        mark = self.image_token
        token = self.tokenizer.convert_tokens_to_ids(mark)
        found = (ids == token).sum(1).tolist() if token is not None else [0] * len(counts)
        for sample, (tokens, images) in enumerate(zip(found, counts, strict=True)):
            if tokens != images:
                raise DataError(
                    f"sample {sample} has {images} images, but {tokens} tokens {mark} (id {token}) in its text; "
                    f"the tokenizer must have {mark} as one special token, and the chat template must write it for "
                    "each image"
                )


def expand_media(messages: Messages, media: Sequence[FrameSource]) -> list[dict[str, Any]]:
    """Return the messages with all contents as parts, and one image part for each frame of a media part."""
    sources, expanded = iter([source for _, source in media_of(messages, media)]), []
    for message in messages:
        content = message["content"]
        parts: list[dict[str, Any]] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            is_text = part["type"] == "text"
            parts += [{"type": "text", "text": part["text"]}] if is_text else [{"type": "image"}] * len(next(sources))
        expanded.append({"role": message["role"], "content": parts})
    return expanded


def image_counts(media: Sequence[Sequence[FrameSource]]) -> list[int]:
    return [sum(len(source) for source in sources) for sources in media]


def to_pil_images(frames: Tensor) -> list[Any]:
    """Convert (n, 3, H, W) uint8 to PIL images, which image processors of every backend treat in the same way."""
    from PIL import Image

    return [Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames]


def answer_spans(
    messages: Sequence[dict[str, Any]], write: Callable[[Sequence[dict[str, Any]], bool], str]
) -> list[Span]:
    """Return the character ranges of ``write(messages, False)`` that hold the answers and their ends.

    Raises:
        DataError: the chat template changes the text of earlier messages when a message is appended.
    """
    whole, spans = write(messages, False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened, closed = write(messages[:number], True), write(messages[: number + 1], False)
        if not (closed.startswith(opened) and whole.startswith(closed)):
            raise DataError(
                f"message {number}: the chat template writes earlier messages differently when later ones follow, so "
                "the answers cannot be found in the text; use a template that only appends"
            )
        spans.append((len(opened), len(closed)))
    return spans


def tokenize(
    tokenizer: Any,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]] | None,
    *,
    padding_side: str | None,
    add_special_tokens: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return input_ids, attention_mask and labels, (B, L) each; no labels if `spans` is None.

    Raises:
        DataError: the tokenizer cannot pad several texts, or has no character offsets.
    """
    if len(texts) > 1 and tokenizer.pad_token_id is None:
        raise DataError(
            "the tokenizer has no pad token, so texts of different lengths cannot be batched; set pad_token"
        )
    if spans is not None and not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} has no character offsets, so the tokens of the answers cannot be found; use "
            "the fast tokenizer (tokenizer.json) of this model"
        )
    encoded = tokenizer(
        list(texts),
        padding=len(texts) > 1,
        return_tensors="pt",
        add_special_tokens=add_special_tokens,
        return_token_type_ids=False,
        return_attention_mask=True,
        return_offsets_mapping=spans is not None,
        **({} if padding_side is None else {"padding_side": padding_side}),
    )
    ids, labels = encoded["input_ids"], None
    if spans is not None:
        labels = ids.masked_fill(torch.tensor(target_mask(encoded["offset_mapping"], spans)) == 0, -100)
    return ids, encoded["attention_mask"], labels
