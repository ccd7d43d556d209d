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
from typing import Any

from mllm_seqpar.errors import ConfigError, DataError, VideoError

from .frame_choice import FRAME_FIELDS, FrameChoice

_Check = Callable[[str], object] | None

_PART_KEYS = {
    "text": {"type", "text"},
    "image": {"type", "path", "images", *FRAME_FIELDS},  # some of them are refused by name
    "video": {"type", "path", "images", *FRAME_FIELDS},
}
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
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant"):
            raise DataError(f"message {number} has the role {role!r}; expected one of system, user, assistant")
        content, where = message.get("content"), f"message {number} ({role})"
        if unknown := sorted(set(message) - {"role", "content"}):
            raise DataError(f"{where}: unknown key {unknown[0]!r}; a message has role and content")
        if not isinstance(content, (str, list)):
            raise DataError(f"{where}: its content is {content!r:.80}; a text or a list of parts")
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or [None]:
            if fault := _part_fault(part, role, check_file, marks):
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


def part_files(part: Mapping[str, Any]) -> list[str]:
    """Return the names of the files of a media part, as its record writes them."""
    return part.get("images") or [part["path"]]


def _part_fault(part: Any, role: str, check_file: _Check, marks: Sequence[str]) -> str | None:
    """Return what is wrong with one part of a message's content, or None."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "image", "video"):
        return f"{part!r:.80} is not a part; a part has the type text, video or image"
    if unknown := sorted(set(part) - _PART_KEYS[kind]):
        return f"unknown key {unknown[0]!r} in {part!r:.80}; a part of type {kind} takes {sorted(_PART_KEYS[kind])}"
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            return f"a text part without text: {part!r:.80}"
        found = [mark for mark in marks if mark in text]
        return f"its text holds {found[0]}; show media by parts, and leave the model's own marks out" if found else None
    if role != "user":
        return f"a message of the {role} has a part of type {kind}; only a user message shows media"
    return _media_fault(part, kind, check_file)


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
