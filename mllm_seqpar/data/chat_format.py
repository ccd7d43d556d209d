"""The format of conversations about videos and images, and its validation; `formats` converts other formats to it.

One conversation per line:

    {"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": "..."}]}

Media parts:

- {"type": "video", "path": FILE}, optionally with "fps", "num_frames" or "max_frames" for this video, and with "start"
  and "end", seconds, for a clip of it
- {"type": "video", "images": [FILE, ...]}, a list of images as a video
- {"type": "image", "path": FILE}, one frame, or one frame per tile if the model's processor cuts images into tiles

A path may be a URL. Relative paths start at the folder of the JSONL file. A line may have further keys, such as an id,
but no keys that name media or tools outside the messages. Messages and parts have no further keys.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mllm_seqpar.errors import ConfigError, DataError, VideoError
from mllm_seqpar.models.messages import message_parts

from .frame_choice import FRAME_FIELDS, FrameChoice

_Source = TypeVar("_Source")
_Check = Callable[[str], object] | None

_PART_KEYS = dict.fromkeys(("image", "video"), ("path", "images", *FRAME_FIELDS))  # some are refused by name
_PART_KEYS["text"] = ("text",)
_REFUSED_KEYS = {"image", "images", "video", "videos", "audio", "audios", "tools", "system", *FRAME_FIELDS}
"""Keys of other formats whose content would be ignored."""


def check_record(
    record: Any, check_file: Callable[[str], object] | None = None, marks: Sequence[str] = (), *, answered: bool = True
) -> list[Mapping[str, Any]]:
    """Return the messages of one decoded line; no text may contain `marks`.

    Args:
        check_file: called with the name of each file; raises VideoError if it does not exist. None: not checked.
        answered: whether a message of the assistant is required.

    Raises:
        DataError: the line is malformed, or a file does not exist; names the message and the problem.
    """
    record = record if isinstance(record, dict) else {}
    if refused := sorted(_REFUSED_KEYS & set(record)):
        raise DataError(
            f"has the key {refused[0]!r} outside the messages, which would be ignored; media are parts of a "
            'message, such as {"type": "video", "path": "a.mp4"}, and a system prompt is a message'
        )
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError('needs "messages", a list of {"role": ..., "content": ...}')
    for number, message in enumerate(messages):
        parts = message_parts(number, message, _PART_KEYS)
        where = f"message {number} ({message['role']})"
        if unknown := sorted(set(message) - {"role", "content"}):
            raise DataError(f"{where}: unknown key {unknown[0]!r}; a message has role and content")
        for part in parts:
            if fault := _part_fault(part, check_file, marks):
                raise DataError(f"{where}: {fault}")
    answers = {n: message["content"] for n, message in enumerate(messages) if message["role"] == "assistant"}
    if answered and not answers:
        raise DataError("has no message of the assistant, so there are no target tokens")
    for number, answer in answers.items() if answered else ():
        texts = [answer] if isinstance(answer, str) else [part["text"] for part in answer]
        if not any(text.strip() for text in texts):
            raise DataError(
                f"message {number} (assistant) is empty, which would only train the model to end its answer; "
                "give the answer, or leave the message or the record out"
            )
    return messages


def media_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts of type video and image, in order."""
    return [
        part
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] != "text"
    ]


def media_of(messages: Sequence[Mapping[str, Any]], sources: Sequence[_Source]) -> list[tuple[str, _Source]]:
    """Return the kind and the source of each media part.

    Raises:
        DataError: unless there is one source for each.
    """
    parts = media_parts(messages)
    if len(parts) != len(sources):
        raise DataError(
            f"{len(sources)} videos and images were passed, and the conversation has {len(parts)} media parts; pass "
            "one for each"
        )
    return [(part["type"], source) for part, source in zip(parts, sources, strict=True)]


def part_files(part: Mapping[str, Any]) -> list[str]:
    """Return the names of the files of a media part, as its record writes them."""
    return part.get("images") or [part["path"]]


def _part_fault(part: Mapping[str, Any], check_file: _Check, marks: Sequence[str]) -> str | None:
    """Return what is wrong with the text or the medium of a part, or None."""
    if part["type"] != "text":
        return _media_fault(part, part["type"], check_file)
    found = [mark for mark in marks if mark in part["text"]]
    return f"its text holds {found[0]}; show media by parts, and leave the model's own marks out" if found else None


def _media_fault(part: Mapping[str, Any], kind: str, check_file: _Check) -> str | None:
    listed = part.get("images") if kind == "video" and "images" in part else [part.get("path")]
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        return f'a part of type {kind} needs "path", a file' + (', or "images", a list' if kind == "video" else "")
    if "images" in part and ("path" in part or kind == "image"):
        return 'both "path" and "images"; give one of them' if kind == "video" else 'an image has a "path"'
    try:
        for name in listed:
            if check_file is not None:
                check_file(name)
        if kind == "image":
            given = [name for name in FRAME_FIELDS if part.get(name) is not None]
            return f"{given[0]} of an image; only a video takes it" if given else None
        chosen = FrameChoice.of(part)
        if "images" in part:
            chosen.sampled(listed)
    except (ConfigError, VideoError) as error:
        return str(error)
    return None
