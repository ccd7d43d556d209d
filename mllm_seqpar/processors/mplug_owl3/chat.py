"""Conversations as text: ChatML with one placeholder per frame, in pieces that are tokenized one by one.

As in the published code, images and videos are expanded in a message's text first, and the text is split at `<|image|>`
only. The marks around a video are plain text, which byte pairs merge with adjacent characters.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mllm_seqpar.chats.chat import Chat, MessageError

IMAGE = "<|image|>"
VIDEO = "<|video|>"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
VIDEO_START, VIDEO_END = "<|start_video_frame|>", "<|end_video_frame|>"
TEMPLATES = ("v2", "v3")

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": text, or a list of parts}.

A part is {"type": "text", "text": ...}, {"type": "image", ...} or {"type": "video", ...}. A text may contain the
placeholders `<|image|>` and `<|video|>`."""

MEDIA = re.compile(f"{re.escape(IMAGE)}|{re.escape(VIDEO)}")
_ANSWER = f"\n{IM_START}assistant\n"

_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{%- set content = message.content -%}
{%- else -%}{%- set content -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|image|>' }}
{%- elif part.type == 'video' -%}{{ '<|video|>' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endset -%}{%- endif -%}
{%- if loop.first and message.role != 'system' -%}{{ '<|im_start|>system\\n<|im_end|>' }}{%- endif -%}
{%- if message.role == 'assistant' -%}
{{ '\\n<|im_start|>assistant\\n' }}
{%- if content or training or not loop.last -%}
{%- generation -%}{{ content + '<|im_end|>END' }}{%- endgeneration -%}
{%- endif -%}
{%- else -%}
{{ ('' if message.role == 'system' else '\\n') + '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' }}
{%- endif -%}
{%- if loop.last and add_generation_prompt and (message.role != 'assistant' or content or training) -%}
{{ '\\n<|im_start|>assistant\\n' }}
{%- endif -%}
{%- endfor -%}
"""


def chat_template(end_of_document: str = "") -> str:
    """Return the published format as Jinja: ChatML, with an empty system message where a conversation has none.

    A final assistant message of empty content is the beginning of an answer, as published; with `training` it is an
    answer. `end_of_document` follows each answer and is part of it.
    """
    return _TEMPLATE.replace("END", end_of_document)


@dataclass(frozen=True)
class Piece:
    """A piece of text that is tokenized separately.

    Attributes:
        text: the characters.
        start: the position of the first one in the formatted text.
        is_target: whether the piece is part of an answer, and therefore of the labels.
        replaced: for each placeholder that was replaced, its range in `text` and the range of the placeholder in the
            formatted text.
    """

    text: str
    start: int = 0
    is_target: bool = False
    replaced: tuple[tuple[int, int, int, int], ...] = ()

    def formatted_range(self, start: int, end: int) -> tuple[int, int]:
        """Return where characters of this piece are in the formatted text; a placeholder counts as a whole."""
        first, last = start + self.start, end + self.start
        for begin, stop, old_begin, old_stop in self.replaced:
            if start >= stop:
                first = old_stop + start - stop
            elif start >= begin:
                first = old_begin
            if end >= stop:
                last = old_stop + end - stop
            elif end > begin:
                last = old_stop
        return first, last


def check_conversation(messages: Sequence[Message]) -> None:
    """Raise DataError unless `Chat.parse` accepts the messages, and only the user's texts have placeholders."""
    for number, turn in enumerate(Chat.parse(messages).turns):
        if turn.role != "user" and MEDIA.search(turn.text):
            fault = "has the placeholder of an image or video in its text; only a user message shows media"
            raise MessageError(fault, [number], turn.role)


def text_pieces(text: str, answers: Iterable[tuple[int, int]] = ()) -> list[Piece]:
    """Return the pieces of formatted text: an answer is tokenized separately from what precedes and follows it.

    Args:
        text: a formatted conversation.
        answers: the ranges of its answers, which are targets; without them, an answer follows each mark that opens one.
    """
    ranges = sorted(answers)
    cuts = {0, len(text), *(mark.end() for mark in re.finditer(re.escape(_ANSWER), text))}
    cuts |= {edge for span in ranges for edge in span}
    edges = sorted(cuts)
    return [
        Piece(text[first:last], first, any(start <= first < stop for start, stop in ranges))
        for first, last in zip(edges, edges[1:], strict=False)
    ]


def placeholders(samples: Iterable[Iterable[Piece]]) -> list[str]:
    """Return `IMAGE` or `VIDEO` for each media placeholder of the samples, in order."""
    return [kind for pieces in samples for piece in pieces for kind in MEDIA.findall(piece.text)]


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
    expanded = []
    for piece in pieces:
        parts, length, last, replaced = [], 0, 0, []
        for mark in MEDIA.finditer(piece.text):
            kept, text = piece.text[last : mark.start()], next(texts[mark[0]])
            begin = length + len(kept)
            replaced.append((begin, begin + len(text), piece.start + mark.start(), piece.start + mark.end()))
            parts += [kept, text]
            length, last = begin + len(text), mark.end()
        text = "".join([*parts, piece.text[last:]])
        expanded.append(replace(piece, text=text, replaced=tuple(replaced)))
    return expanded
