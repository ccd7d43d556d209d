"""Conversations as text: ChatML with one placeholder per frame, in the pieces that are tokenised one by one."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mllm_seqpar.errors import DataError

IMAGE = "<|image|>"
VIDEO = "<|video|>"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
VIDEO_START, VIDEO_END = "<|start_video_frame|>", "<|end_video_frame|>"

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": text, or a list of parts}.

A part is {"type": "text", "text": ...}, {"type": "image", ...} or {"type": "video", ...}; a text may hold the
placeholders itself."""

_MEDIA = re.compile(f"({re.escape(IMAGE)}|{re.escape(VIDEO)})")


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is tokenised on its own.

    Attributes:
        text: never holds a placeholder together with anything else.
        learned: part of an answer, and so of the training targets.
    """

    text: str
    learned: bool = False


def conversation_pieces(
    messages: Sequence[Message], *, add_generation_prompt: bool = False, end_of_document: str = ""
) -> list[Piece]:
    """The pieces of one conversation; a conversation without a system message gets an empty one, as in training.

    Args:
        messages: in order.
        add_generation_prompt: ends with the beginning of an answer.
        end_of_document: follows each answer, and is learned with it.

    Raises:
        DataError: a role or part that does not exist.
    """
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), content_text(message.get("content"), number)
        if number == 0 and role != "system":
            pieces.append(Piece(f"{IM_START}system\n{IM_END}"))
        if role == "system":
            pieces.append(Piece(f"{IM_START}system\n{content}{IM_END}"))
        elif role == "user":
            pieces += (Piece(part) for part in _MEDIA.split(f"\n{IM_START}user\n{content}{IM_END}") if part)
        elif role == "assistant":
            pieces += [Piece(f"\n{IM_START}assistant\n"), Piece(f"{content}{IM_END}", learned=True)]
            pieces += [Piece(end_of_document, learned=True)] if end_of_document else []
        else:
            raise DataError(f"message {number} has the role {role!r}; it is one of system, user, assistant")
        if role != "user" and _MEDIA.search(content):
            raise DataError(f"message {number} of role {role!r} holds an image or video; only a user shows them")
    if add_generation_prompt:
        pieces.append(Piece(f"\n{IM_START}assistant\n"))
    return pieces


def text_pieces(text: str) -> list[Piece]:
    """The pieces of a text that is formatted already."""
    return [Piece(part) for part in _MEDIA.split(text) if part]


def content_text(content: Any, number: int) -> str:
    """A message's content with a placeholder for each image and video part."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, Iterable) else [None]:
        part = part if isinstance(part, Mapping) else {"type": None, "found": part}
        kind, text = part.get("type"), part.get("text")
        if kind not in ("text", "image", "video") or (kind == "text" and not isinstance(text, str)):
            raise DataError(
                f"message {number} holds {part!r:.80}; content is a text, or a list of parts like "
                '{"type": "video"}, {"type": "image"}, {"type": "text", "text": "..."}'
            )
        texts.append({"image": IMAGE, "video": VIDEO}.get(kind) or str(text))
    return "".join(texts)


def media_parts(messages: Sequence[Message], kind: str) -> list[Any]:
    """What the parts of that kind ("image" or "video") hold under its name, in order; parts without are left out."""
    return [
        part[kind]
        for message in messages
        if not isinstance(message.get("content"), str)
        for part in message.get("content") or ()
        if part.get("type") == kind and kind in part
    ]


def expand_videos(pieces: Iterable[Piece], frames: Iterator[int], *, span: bool) -> Iterator[Piece]:
    """Puts one image placeholder per frame in place of each video's, taking the numbers of frames from `frames`.

    Args:
        pieces: of one sample.
        frames: frames of each video, in order; shared by the samples of a batch.
        span: whether the frames of a video are enclosed in its start and end marks.

    Raises:
        DataError: more videos in the text than numbers.
    """
    for piece in pieces:
        if piece.text != VIDEO:
            yield piece
            continue
        count = next(frames, None)
        if count is None:
            raise DataError(f"the text has more {VIDEO} than there are videos; pass one video for each, in order")
        if span:
            yield Piece(VIDEO_START)
        yield from [Piece(IMAGE)] * count
        if span:
            yield Piece(VIDEO_END)
