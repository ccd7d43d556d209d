"""Conversations as text: ChatML with one placeholder per frame, in pieces that are tokenized one by one.

As published, images and videos are expanded in a message's text, and only then is the text cut, at `<|image|>` alone:
the marks around a video are plain text, which byte pairs merge with what stands beside it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

_MEDIA = re.compile(f"{re.escape(IMAGE)}|{re.escape(VIDEO)}")
_ANSWER = f"\n{IM_START}assistant\n"


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is tokenized on its own, but for the cuts at its placeholders.

    Attributes:
        text: with placeholders where media stand.
        learned: part of an answer, and so of the training targets.
    """

    text: str
    learned: bool = False


def conversation_pieces(
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    end_of_document: str = "",
    training: bool = False,
) -> list[Piece]:
    """Return the pieces of one conversation; one without a system message gets an empty one, as in training.

    Args:
        messages: in order. A final assistant message of empty content is the beginning of an answer, as published.
        add_generation_prompt: whether to end with the beginning of an answer.
        end_of_document: follows each answer, and is learned with it.
        training: whether a final empty answer is an answer to learn.

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
            pieces.append(Piece(f"\n{IM_START}user\n{content}{IM_END}"))
        elif role == "assistant" and not content and number == len(messages) - 1 and not training:
            add_generation_prompt = True
        elif role == "assistant":
            pieces += [Piece(_ANSWER), Piece(f"{content}{IM_END}", learned=True)]
            pieces += [Piece(end_of_document, learned=True)] if end_of_document else []
        else:
            raise DataError(f"message {number} has the role {role!r}; it is one of system, user, assistant")
        if role != "user" and _MEDIA.search(content):
            raise DataError(f"message {number} of role {role!r} holds an image or video; only a user shows them")
    if add_generation_prompt:
        pieces.append(Piece(_ANSWER))
    return pieces


def text_pieces(text: str) -> list[Piece]:
    """Return the pieces of a text that is formatted already: an answer is tokenized apart from what announces it."""
    return [Piece(part) for part in re.split(f"(?<={re.escape(_ANSWER)})", text)]


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


def placeholders(pieces: Iterable[Piece]) -> list[str]:
    """Return the images and videos of a text, in order: `IMAGE` or `VIDEO` for each."""
    return [kind for piece in pieces for kind in _MEDIA.findall(piece.text)]


def video_text(frames: int, *, span: bool) -> str:
    """Return the text that stands for a video: a placeholder for each frame, within the video's marks if `span`."""
    return f"{VIDEO_START}{IMAGE * frames}{VIDEO_END}" if span else IMAGE * frames


def expand_media(pieces: Iterable[Piece], texts: Mapping[str, Iterator[str]]) -> list[Piece]:
    """Return the pieces with the next of its kind in `texts`, by `IMAGE` and `VIDEO`, for each image and video."""
    return [replace(piece, text=_MEDIA.sub(lambda found: next(texts[found[0]]), piece.text)) for piece in pieces]
