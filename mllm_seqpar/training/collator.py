"""A data collator for conversations with images and videos, for `Trainer`, `SeqParTrainer` and TRL's trainers.

It gives the models of each family the same inputs as fine-tuning does. For prompts with images, TRL's own collators
join prompt and completion after tokenization. Their masks of images then have the length of the prompt, and positions
of images refer to the text before padding was removed. This collator tokenizes the whole conversation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.chats.batch import ChatSample, collate, load_local_images
from mllm_seqpar.chats.chat import Allowed, Chat, Turn
from mllm_seqpar.chats.chat_family import chat_family
from mllm_seqpar.chats.clip import Clip, FrameSource
from mllm_seqpar.errors import ConfigError, DataError, placed
from mllm_seqpar.processors.base import frame_list, to_tensor
from mllm_seqpar.videos.frame_choice import FrameChoice

Example = Mapping[str, Any]

_NAMES = {"lang_x": "input_ids", "vision_x": "pixel_values"}
"""OpenFlamingo's names of arguments, which trainers would not find, and those that its forward takes too."""

_ALLOWED = Allowed(sources={"image": ("image", "path", "url"), "video": ("video", "path", "url", "images")})
_COLUMNS = {"image": ("images", "image"), "video": ("videos", "video")}


class SeqParDataCollator:
    """Tokenize a batch of conversations, preprocess their images and videos, and return the arguments of forward.

    Examples have one of these sets of keys, as TRL names them:

    - "messages": all answers are trained on;
    - "prompt" and "completion": the completion is trained on;
    - "prompt", "chosen" and "rejected": for `DPOTrainer`, with "completion_mask" instead of labels.

    Each is a list of messages {"role": ..., "content": text or parts}. A part contains its medium, {"type": "image",
    "image": image} or {"type": "video", "video": frames}, or is a placeholder, {"type": "image"}, for the next medium
    of the column "images" (or "image", "videos", "video"). If all contents are texts, the media of these columns
    come before the first text of the user. A medium is an image or an array, a path, or a URL; a video may be a list of
    them. The part of a video may state which frames are used, with the fields of `FrameChoice`.

    Every rank returns the whole batch, as an unpatched model takes it; a patched model shards it.

    Args:
        processor: the model's.
        assistant_only_loss: False trains on all tokens of "messages", as TRL does by default.
        max_length: the largest number of tokens of a conversation; a longer one is refused.
        fps, num_frames, max_frames: the frames of each video, as for `ChatDataset`.

    Raises:
        DataError: by a call, for examples of another form; names the example and the problem.
    """

    def __init__(
        self,
        processor: Any,
        *,
        assistant_only_loss: bool = True,
        max_length: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
        max_frames: int | None = None,
    ) -> None:
        self.processor, self.assistant_only_loss, self.max_length = processor, assistant_only_loss, max_length
        self._frames = FrameChoice(fps=fps, num_frames=num_frames, max_frames=max_frames)
        self._chat_format = chat_family(processor)

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return the batch of these examples; of preferences, all chosen ones and then all rejected ones."""
        endings = [ending for ending in ("chosen", "rejected") if ending in examples[0]] or ["completion"]
        if "messages" in examples[0]:
            prompts, chats = None, [_chat(number, x, "messages") for number, x in enumerate(examples)]
        elif all(key in x for x in examples for key in ("prompt", *endings)):
            prompts = [_chat(number, x, "prompt") for number, x in enumerate(examples)] * len(endings)
            ends = [_chat(number, x, key) for key in endings for number, x in enumerate(examples)]
            chats = [Chat(prompt.turns + end.turns) for prompt, end in zip(prompts, ends, strict=True)]
        else:
            raise DataError(
                f"an example has the keys {', '.join(examples[0]) or '(none)'}; expected messages, prompt and "
                "completion, or prompt, chosen and rejected. If the data has them, pass remove_unused_columns=False to "
                "TrainingArguments"
            )
        return self._batch(chats, prompts, preference=len(endings) == 2)

    def _batch(self, chats: list[Chat], prompts: list[Chat] | None, preference: bool) -> dict[str, Tensor]:
        samples = []
        for number, chat in enumerate(chats):
            place = f"conversation {number} of the batch"
            with placed(place, DataError):
                chat.check_order()
            samples.append(ChatSample(place, chat, tuple(self._source(medium) for medium in chat.media)))
        batch = collate(samples, self.processor, self.max_length)
        text, labels = batch.text, batch.labels
        if prompts is not None:
            # The answers in the prompts are the first targets of each row.
            sources = [sample.sources[: len(prompt.media)] for sample, prompt in zip(samples, prompts, strict=True)]
            messages = [prompt.to_json() for prompt in prompts]
            answers: Any = self._chat_format.text(messages, sources, labels=True, padding_side="right").labels
            earlier = (answers != -100).sum(1, keepdim=True)
            labels = labels.masked_fill((labels != -100).cumsum(1) <= earlier, -100)
        elif not self.assistant_only_loss:
            labels = text.input_ids.masked_fill(text.attention_mask == 0, -100)
        arguments = self._chat_format.arguments(text)
        arguments.pop("labels")
        if text.slots:
            pixels = load_local_images(batch, range(len(text.slots)), self._chat_format)
            if self._chat_format.always_sharded:  # unpatched, these models take the images of each sample
                pixels = tuple(x.unflatten(0, (len(samples), -1)) for x in pixels)
            frames = zip(self._chat_format.frame_names, pixels, strict=True)
            arguments |= {name: x for name, x in frames if len(x)}
        renamed = {_NAMES.get(name, name): value for name, value in arguments.items()}
        return renamed | ({"completion_mask": (labels != -100).long()} if preference else {"labels": labels})

    def _source(self, medium: Clip) -> FrameSource:
        source = medium.source
        if source is None:
            raise DataError(f"a part of type {medium.kind} has no {medium.kind}, and no column of the example has one")
        if medium.kind == "video" and not _is_file(source):
            medium = replace(medium, source=tuple(frame_list(source)))
        numbers = count()
        with placed("a part of type video", ConfigError, DataError):
            return medium.open(
                self._chat_format, frames=self._frames, locate=lambda image: _file_or_tensor(image, next(numbers))
            )


def _is_file(source: Any) -> bool:
    return isinstance(source, (str, os.PathLike))


def _file_or_tensor(image: Any, number: int) -> Any:
    """Return a name as it is, and an image in memory as a tensor; raise DataError unless it is uint8."""
    if _is_file(image):
        return image
    # Tables return arrays as nested lists.
    tensor = to_tensor(torch.tensor(image, dtype=torch.uint8) if isinstance(image, list) else image, number)
    if tensor.dtype != torch.uint8:
        raise DataError(f"an image is {tensor.dtype}; pass PIL images, or arrays of uint8 from 0 to 255")
    return tensor


def _chat(number: int, example: Example, key: str) -> Chat:
    """Return the conversation under `key`, with the media of the example's columns in their parts."""
    if example.get("tools"):
        raise DataError(
            f"example {number} has tools, which the chat formats of these models do not support; leave them out"
        )
    messages = example[key]
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"example {number}: {key} is {messages!r:.80}; expected messages {{'role': ..., 'content': ...}}"
        )
    with placed(f"example {number}", DataError):
        chat = Chat.parse(messages, _ALLOWED)
    contents: list[list[Any]] = [list(turn.parts) for turn in chat.turns]
    for kind, columns in _COLUMNS.items() if key in ("messages", "prompt") else ():
        column: Any = next((example[name] for name in columns if example.get(name) is not None), [])
        media = list(column) if isinstance(column, (list, tuple)) else [column]
        asked = next((parts for turn, parts in zip(chat.turns, contents, strict=True) if turn.role == "user"), None)
        if media and asked is not None and not any(_is_open(part, kind) for parts in contents for part in parts):
            asked[:0] = [Clip(kind) for _ in media]
        places = [(parts, i) for parts in contents for i, part in enumerate(parts) if _is_open(part, kind)]
        if len(places) != len(media):
            raise DataError(
                f"example {number} has {len(media)} {kind}s in its columns, and {len(places)} parts "
                f"{{'type': '{kind}'}} without one; pass one for each"
            )
        for (parts, i), medium in zip(places, media, strict=True):
            parts[i] = Clip(kind, medium, parts[i].frames)
    return Chat(tuple(Turn(turn.role, tuple(parts)) for turn, parts in zip(chat.turns, contents, strict=True)))


def _is_open(part: Any, kind: str) -> bool:
    return isinstance(part, Clip) and part.kind == kind and part.source is None
