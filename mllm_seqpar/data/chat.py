"""Chats about videos and pictures: a JSONL file, and micro-batches of it whose frames each rank reads its part of.

One conversation per line:

    {"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": "..."}]}

Parts that show something: {"type": "video", "path": FILE}, with "fps", "num_frames" or "max_frames" of its own if
wanted; {"type": "video", "images": [FILE, ...]}, a list of pictures as a video; {"type": "image", "path": FILE}, one
frame, or as many tiles as the model's processor cuts it into. Relative paths start at the JSONL's folder. A line may
have further keys, such as an id, but none that name media or tools beside the messages; messages and parts have no
others.

Which frames a micro-batch has is known without decoding any, on every rank the same. They form one flat list, sample
after sample in the order of the text's placeholders; a rank decodes the range of it that it owns and nothing else.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import DataError, VideoError

from .chat_families import ChatFamily, ChatText, chat_family
from .chat_family import joined
from .sources import FrameSource, ImageListSource, VideoSource

DEFAULT_FPS = 1.0
"""Frames a second of a video for which neither the data nor the caller says anything."""

_SAMPLING = ("fps", "num_frames", "max_frames")
_PART_KEYS = {
    "text": {"type", "text"},
    "image": {"type", "path", "images", *_SAMPLING},  # some of them are refused by name
    "video": {"type", "path", "images", *_SAMPLING},
}
_BESIDE_MESSAGES = {"image", "images", "video", "videos", "audio", "audios", "tools", "system", *_SAMPLING}
"""Keys of other formats, whose content the model would never be shown."""


@dataclass(frozen=True)
class ChatSample:
    """One conversation and what it shows, nothing of it decoded.

    Attributes:
        line: in the JSONL, from 1.
        messages: checked.
        sources: what the parts show, in order.
    """

    line: int
    messages: list[Mapping[str, Any]]
    sources: tuple[FrameSource, ...]

    @property
    def frames(self) -> int:
        """Frames of all its sources."""
        return sum(len(source) for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class ChatBatch:
    """A micro-batch: text, padded, and where its frames come from.

    Attributes:
        text: as tokens, with labels: the answers and their ends, -100 elsewhere.
        sources: of all samples, in the order of the flat list of frames.
        frames: length of that list.
        lines: of the samples in the JSONL.
    """

    text: ChatText
    sources: tuple[FrameSource, ...]
    frames: int
    lines: tuple[int, ...]

    @property
    def input_ids(self) -> Tensor:
        """(B, L)."""
        return self.text.input_ids

    @property
    def attention_mask(self) -> Tensor:
        """(B, L)."""
        return self.text.attention_mask

    @property
    def labels(self) -> Tensor:
        """(B, L)."""
        assert self.text.labels is not None  # `collate` asks for them
        return self.text.labels

    @property
    def media_offset(self) -> Tensor:
        """(B, N), positions of the placeholders, filled up with -1; of mPLUG-Owl3."""
        return self.text.extras["media_offset"]

    @property
    def targets(self) -> int:
        """Tokens that the loss counts."""
        return int((self.labels[:, 1:] != -100).sum())

    @property
    def tokens(self) -> int:
        """Tokens of text without padding."""
        return int(self.attention_mask.sum())


class ChatDataset:
    """The conversations of a JSONL file; all lines are checked on opening, videos when a sample is asked for.

    Args:
        path: of the JSONL.
        processor: of the model; its family (`families`) turns conversations into tokens.
        fps, num_frames, max_frames: frames to take of each video (`plan_frames`). `fps` or `num_frames` here takes the
            place of what a line says; `max_frames` here is a limit on top of it.
        max_length: most tokens of a sample; a longer one is refused.

    Raises:
        DataError: a line that is no conversation, with its number and what is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        processor: Any,
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        max_frames: int | None = None,
        max_length: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.processor = processor
        self._family = chat_family(processor)
        self.max_length = max_length
        self._rate = {"fps": fps, "num_frames": num_frames}
        self._limit = max_frames
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}); give a JSONL file of chats") from error
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        rows = ((number, row) for number, row in enumerate(content.splitlines(), 1) if row.strip())
        self._rows = [(number, self._messages(number, row)) for number, row in rows]
        if not self._rows:
            raise DataError(f"{self.path}: holds no conversation; give a JSONL file with one on each line")
        self._open_video = lru_cache(maxsize=65_536)(VideoSource.open)  # later epochs need not probe again

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ChatSample:
        number, messages = self._rows[index]
        sources: list[FrameSource] = []
        for part in _media(messages):
            try:
                source = self._source(part)
            except VideoError as error:
                raise VideoError(f"{self.path}:{number}: {error}") from error
            sources.append(source)
        return ChatSample(number, messages, tuple(sources))

    def batch(self, indices: Sequence[int]) -> ChatBatch:
        """The samples with these numbers as one micro-batch; decodes nothing.

        Raises:
            DataError: a sample longer than `max_length`.
            VideoError: a video that cannot be opened, with line and path.
        """
        return collate([self[index] for index in indices], self.processor, self.max_length, str(self.path))

    def _source(self, part: Mapping[str, Any]) -> FrameSource:
        if part["type"] == "image":
            return self._family.still(self.path.parent / part["path"])
        if "images" in part:
            names = part["images"]
            asked = (part.get("num_frames"), part.get("max_frames"), self._limit)
            limits = [number for number in asked if number is not None]
            chosen = _evenly(names, min(limits, default=len(names)))
            return ImageListSource([self.path.parent / name for name in chosen])
        own = {name: part.get(name) for name in _SAMPLING}
        if any(self._rate.values()):
            own |= self._rate
        if not (own["fps"] or own["num_frames"]):
            own["fps"] = DEFAULT_FPS
        limits = [n for n in (own["max_frames"], self._limit) if n is not None]
        return self._open_video(str(self.path.parent / part["path"]), **own | {"max_frames": min(limits, default=None)})

    def _messages(self, number: int, row: bytes) -> list[Mapping[str, Any]]:
        try:
            record = json.loads(row)
        except ValueError as error:
            raise DataError(f"{self.path}:{number}: not JSON ({error}); each line holds one conversation") from error
        beside = sorted(_BESIDE_MESSAGES & set(record)) if isinstance(record, dict) else []
        if beside:
            raise DataError(
                f"{self.path}:{number}: has {beside[0]!r} beside the messages, which would be ignored; media are parts "
                'of a message, such as {"type": "video", "path": "a.mp4"}, and a system prompt is a message'
            )
        try:
            return check_messages(
                record.get("messages") if isinstance(record, dict) else None, self.path.parent, self._family.marks
            )
        except DataError as error:
            raise DataError(f"{self.path}:{number}: {error}") from error


def collate(
    samples: Sequence[ChatSample], processor: Any, max_length: int | None = None, name: str = "data"
) -> ChatBatch:
    """Samples as one micro-batch, padded on the right; their frames as one list of sources.

    Raises:
        DataError: a sample longer than `max_length`, or that the family cannot write; with its line.
    """
    try:
        text = chat_family(processor).text(
            [sample.messages for sample in samples],
            [sample.sources for sample in samples],
            labels=True,
            padding_side="right",
        )
    except DataError as error:
        raise DataError(f"{name}:{','.join(str(sample.line) for sample in samples)}: {error}") from error
    lengths = text.attention_mask.sum(1).tolist()
    for sample, length in zip(samples, lengths, strict=True):
        if max_length is not None and length > max_length:
            raise DataError(
                f"{name}:{sample.line}: {length} tokens ({sample.frames} of them stand for frames), more than "
                f"max_length = {max_length}; raise it, or take fewer frames"
            )
    return ChatBatch(
        text=text,
        sources=tuple(source for sample in samples for source in sample.sources),
        frames=sum(sample.frames for sample in samples),
        lines=tuple(sample.line for sample in samples),
    )


def load_local_frames(batch: ChatBatch, frames: range, image_processor: Any, *, at_once: int = 32) -> Tensor:
    """Decodes frames of a batch's flat list, those of this rank: (len(frames), 3, S, S) as the model takes them.

    Args:
        batch: the micro-batch.
        frames: as `frame_range(batch.frames, group)` gives it; may be empty and may span several samples.
        image_processor: takes uint8 frames (n, 3, H, W), returns `pixel_values`.
        at_once: decoded frames held at a time besides the result.
    """
    parts = [image_processor(decoded)["pixel_values"] for decoded in _decoded(batch, frames, at_once)]
    return torch.cat(parts) if parts else image_processor(torch.empty(0, 3, 1, 1))["pixel_values"]


def load_local_pictures(batch: ChatBatch, slots: range, family: ChatFamily, *, at_once: int = 32) -> tuple[Tensor, ...]:
    """Decodes pictures of the model's own list, those of this rank: what `family.pixels` gives, (len(slots), ...) each.

    Args:
        batch: the micro-batch.
        slots: as `frame_range(len(batch.text.slots), group)` gives it; padding pictures among them are not decoded.
        family: whose pictures these are.
        at_once: decoded frames held at a time besides the result.
    """
    own = [batch.text.slots[slot] for slot in slots]
    shown = [number for number in own if number >= 0]
    frames = range(shown[0], shown[-1] + 1) if shown else range(0)  # padding is between, so these follow one another
    parts = [family.pixels(decoded) for decoded in _decoded(batch, frames, at_once)]
    if not parts:
        parts = [family.pixels(torch.empty(0, 3, 1, 1, dtype=torch.uint8))]
    made = joined(parts)
    if len(shown) == len(own):
        return made
    places = torch.tensor([slot for slot, number in enumerate(own) if number >= 0], dtype=torch.long)
    whole = tuple(x.repeat(len(own), *[1] * (x.dim() - 1)) for x in family.blank())
    for target, x in zip(whole, made, strict=True):
        target[places] = x.to(target.dtype)
    return whole


def _decoded(batch: ChatBatch, frames: range, at_once: int) -> Iterator[Tensor]:
    """Yields a range of a batch's frames, uint8 (at most `at_once`, 3, H, W) of one size each."""
    ends = list(accumulate(len(source) for source in batch.sources))
    for source, end in zip(batch.sources, ends, strict=True):
        first = end - len(source)
        low, high = max(frames.start, first), min(frames.stop, end)
        if low < high:
            yield from source.read(low - first, high - first, batch=at_once)


def check_messages(messages: Any, folder: Path, marks: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """The messages of a conversation to learn from, if they are well formed and their files exist.

    Args:
        messages: of the conversation.
        folder: where relative paths start.
        marks: texts that no message may hold.

    Raises:
        DataError: what is wrong with which message.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError('needs "messages", a list of {"role": ..., "content": ...}')
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant"):
            raise DataError(f"message {number} has the role {role!r}; it is one of system, user, assistant")
        unknown = sorted(set(message) - {"role", "content"})
        if unknown:
            raise DataError(f"message {number} ({role}): unknown key {unknown[0]!r}; a message has role and content")
        content = message.get("content")
        if not isinstance(content, (str, list)):
            raise DataError(f"message {number} ({role}): its content is {content!r:.80}; a text or a list of parts")
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or [None]:
            fault = _part_fault(part, role, folder, marks)
            if fault:
                raise DataError(f"message {number} ({role}): {fault}")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("has no message of the assistant, so there is nothing to learn from it")
    return messages


def _part_fault(part: Any, role: str, folder: Path, marks: Sequence[str]) -> str | None:
    """What is wrong with one part of a message's content, or None."""
    kind = part.get("type") if isinstance(part, dict) else None
    unknown = sorted(set(part) - _PART_KEYS[str(kind)]) if kind in ("text", "image", "video") else []
    if unknown:
        return (
            f"unknown key {unknown[0]!r} in {part!r:.80}; a part of type {kind} takes {sorted(_PART_KEYS[str(kind)])}"
        )
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            return f"a text part without text: {part!r:.80}"
        found = [mark for mark in marks if mark in text]
        return f"its text holds {found[0]}; show media by parts, and leave the model's own marks out" if found else None
    if kind not in ("video", "image"):
        return f"{part!r:.80} is no part; a part has the type text, video or image"
    if role != "user":
        return f"shows {'an' if kind == 'image' else 'a'} {kind}; only a user shows something"
    listed = part.get("images") if kind == "video" and "images" in part else [part.get("path")]
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        return f'a part of type {kind} needs "path", a file' + (', or "images", a list' if kind == "video" else "")
    if "images" in part and ("path" in part or kind == "image"):
        return 'both "path" and "images"' if kind == "video" else 'an image has a "path"'
    missing = [name for name in listed if not (folder / name).is_file()]
    if missing:
        return f"{folder / missing[0]}: no such file"
    for name in _SAMPLING:
        value, kinds = part.get(name), (int, float) if name == "fps" else (int,)
        if value is not None and (type(value) not in kinds or value <= 0):
            return f"{name} is {value!r}; it is {'a' if name == 'fps' else 'a whole'} number above 0"
    given = [name for name in _SAMPLING if part.get(name) is not None]
    if kind == "image" and given:
        return f"{given[0]} of an image; only a video takes it"
    if part.get("fps") is not None and "images" in part:
        return "fps of a list of pictures, which have no time; give num_frames or max_frames"
    if part.get("fps") is not None and part.get("num_frames") is not None:
        return "both fps and num_frames; give one of them"
    return None


def _evenly(names: list[str], count: int) -> list[str]:
    """At most `count` of the names, evenly spread: each stands in the middle of its share."""
    if count >= len(names):
        return names
    return [names[(2 * number + 1) * len(names) // (2 * count)] for number in range(count)]


def _media(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        part
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] != "text"
    ]
