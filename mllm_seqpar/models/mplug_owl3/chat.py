"""Conversations as text: ChatML with one placeholder per frame, in pieces that are tokenized one by one.

As in the published code, images and videos are expanded in a message's text first, and the text is split at `<|image|>`
only. The marks around a video are plain text, which byte pairs merge with adjacent characters.
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
TEMPLATES = ("v2", "v3")

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": text, or a list of parts}.

A part is {"type": "text", "text": ...}, {"type": "image", ...} or {"type": "video", ...}. A text may contain the
placeholders `<|image|>` and `<|video|>`."""

_MEDIA = re.compile(f"{re.escape(IMAGE)}|{re.escape(VIDEO)}")
_ANSWER = f"\n{IM_START}assistant\n"


@dataclass(frozen=True)
class Piece:
    """A piece of text that is tokenized separately; a target is part of an answer, and therefore of the labels."""

    text: str
    is_target: bool = False


def conversation_pieces(
    messages: Sequence[Message], *, add_generation_prompt: bool, end_of_document: str = "", training: bool = False
) -> list[Piece]:
    """Return the pieces of one conversation. Without a system message it gets an empty one, as in training.

    A final assistant message of empty content is the beginning of an answer, as published; in `training` it is an
    answer with labels. `end_of_document` follows each answer and is part of the labels.

    Raises:
        DataError: an unknown role or part type, or media in a message that is not the user's.
    """
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), _content_text(message.get("content"), number)
        if number == 0 and role != "system":
            pieces.append(Piece(f"{IM_START}system\n{IM_END}"))
        if role == "system":
            pieces.append(Piece(f"{IM_START}system\n{content}{IM_END}"))
        elif role == "user":
            pieces.append(Piece(f"\n{IM_START}user\n{content}{IM_END}"))
        elif role == "assistant" and not content and number == len(messages) - 1 and not training:
            add_generation_prompt = True
        elif role == "assistant":
            pieces += [Piece(_ANSWER), Piece(f"{content}{IM_END}", is_target=True)]
            pieces += [Piece(end_of_document, is_target=True)] if end_of_document else []
        else:
            raise DataError(f"message {number} has the role {role!r}; expected one of system, user, assistant")
        if role != "user" and _MEDIA.search(content):
            raise DataError(
                f"message {number} of role {role!r} holds an image or video; only a user message shows media"
            )
    if add_generation_prompt:
        pieces.append(Piece(_ANSWER))
    return pieces


def text_pieces(text: str) -> list[Piece]:
    """Return the pieces of formatted text: an answer is tokenized separately from the mark that opens it."""
    return [Piece(part) for part in re.split(f"(?<={re.escape(_ANSWER)})", text)]


def _content_text(content: Any, number: int) -> str:
    """Return a message's content as text, with a placeholder for each image and video part."""
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


def media_of(messages: Sequence[Message], kind: str) -> list[Any]:
    """Return the values that parts of type `kind` ("image" or "video") have under the key of that name, in order."""
    return [
        part[kind]
        for message in messages
        if not isinstance(message.get("content"), str)
        for part in message.get("content") or ()
        if part.get("type") == kind and kind in part
    ]


def placeholders(samples: Iterable[Iterable[Piece]]) -> list[str]:
    """Return `IMAGE` or `VIDEO` for each media placeholder of the samples, in order."""
    return [kind for pieces in samples for piece in pieces for kind in _MEDIA.findall(piece.text)]


def video_text(frames: int, *, span: bool) -> str:
    """Return the text of a video: a placeholder for each frame, between the video's marks if `span`."""
    return f"{VIDEO_START}{IMAGE * frames}{VIDEO_END}" if span else IMAGE * frames


def image_text(grid: tuple[int, int] | None, template: str) -> str:
    """Return the text of a still image: one placeholder for each tile of the grid (rows, columns) and the whole image.

    An image without grid is not cut and has one placeholder. `template` is "v2" or "v3", the published forms.
    """
    if grid is None:
        return IMAGE
    rows, columns = grid
    if template == "v2":
        lines = (" ".join(f"subimg({row},{column}){IMAGE}" for column in range(columns)) for row in range(rows))
        head, tail = f"Cut to {rows} rows {columns} columns with a global view", f"global_view{IMAGE}"
    else:
        lines = (" ".join([IMAGE] * columns) for _ in range(rows))
        head, tail = f"<|start_cut|>{rows}*{columns}", f"{IMAGE}<|end_cut|>"
    return "\n".join((head, *lines, tail))


def expand_media(pieces: Iterable[Piece], texts: Mapping[str, Iterator[str]]) -> list[Piece]:
    """Replace each media placeholder by the next text of its kind; `texts` has the keys `IMAGE` and `VIDEO`."""
    return [replace(piece, text=_MEDIA.sub(lambda found: next(texts[found[0]]), piece.text)) for piece in pieces]
