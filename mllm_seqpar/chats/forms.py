"""Records of data sets as chats: our layout, and those of other projects, which are converted to it.

Our layout is one conversation about videos and images:

    {"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": "..."}]}

Media parts:

- {"type": "video", "path": FILE}, optionally with "fps", "num_frames" or "max_frames" for this video, and with "start"
  and "end", seconds, for a clip of it
- {"type": "video", "images": [FILE, ...]}, a list of images as a video
- {"type": "image", "path": FILE}, one frame, or one frame per tile if the model's processor cuts images into tiles

A path may be a URL. Relative paths start at the folder of the JSONL file. A record may have a text `system`, which
becomes the first message, and further keys, such as an id, but none that name media, times or tools outside the
messages. Messages and parts have no further keys.

`read_record` detects other layouts (LLaVA, OpenAI, ms-swift, questions, captions, multiple choice) and writes their
messages in ours, which `Chat.parse` reads. If a layout is unknown, the error names what was found. `records` reads data
sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import DataError
from mllm_seqpar.videos.frame_choice import FRAME_FIELDS
from mllm_seqpar.videos.media_files import VIDEO_SUFFIXES

from .chat import FILES, Chat, with_members, without_nulls
from .multiple_choice import ANSWER_KEYS, DEFAULT_TEMPLATE, OPTION_KEYS, read_choice
from .records import VIDEO_ID

_UNSUPPORTED_KEYS = ("audio", "audios", "tools")
"""Keys of records whose content is refused in all layouts."""

_TURN_WEIGHTS = ("weight", "loss", "loss_scale", "train", "training")
_TURN_KEYS = (*_TURN_WEIGHTS, "loss_mask", "mask", "train_detail", "tool_calls")
"""Keys of LLaVA's turns with which other programs (axolotl, ms-swift, OpenAI) change the targets."""

_NAMES_MEDIA = re.compile(
    r"(?:.*_)?(?:video|image|clip|movie)_?(?:name|file|filename|path|url|link|idx|id)?s?", re.IGNORECASE
)
"""Keys by which data sets name the video of a text: `video_name` of ActivityNet-QA, `video_idx` of EgoSchema, ..."""

_NUMBERS_MEDIA = re.compile(r"idx?s?$", re.IGNORECASE)
"""The end of such a key whose 0 names a video; in others, such as `num_images`, 0 states that there is none."""

_ONE_OPTION = re.compile(r"(?i:option|choice|candidate)s?[ _]?(?:\d|[a-zA-Z])?|a\d|[A-E]")
"""Keys by which data sets state options otherwise than as a list: `option` of EgoSchema, `a0` of NExT-QA, ..."""

CAPTION_PROMPT = "Describe the {kind}."
"""The question of a record that has a caption only; `{kind}` is image or video."""

_MEDIA_KEYS = {
    "image": ("image", "images", "image_path", "image_paths"),
    "video": ("video", "videos", "video_path", "video_paths"),
}
_FILE_NAME = re.compile(r"(^|_)file_names?$")
"""The columns of an image or video folder; the suffix of a name states its kind."""

_CLIP_KEYS = {"start": ("start", "video_start", "start_time"), "end": ("end", "video_end", "end_time")}
"""The keys that state a clip of the video, of a record (as in MVBench) or of a content part (as Qwen's)."""

_ALL_CLIP_KEYS = [key for keys in _CLIP_KEYS.values() for key in keys]

_SAMPLING_KEYS = dict.fromkeys([*FRAME_FIELDS, *_ALL_CLIP_KEYS])
"""The keys of a record that say which frames of its video are used."""

_OUTSIDE = "outside the messages"
_IN_PARTS = (
    'media are parts of a message, such as {"type": "video", "path": "a.mp4"}, and audio and tools are not supported'
)
_BESIDE_PATH = "state it in the part of its video, or leave it out"
_PLACEHOLDER = re.compile(r"\n?<\|?(image|video)\|?>\n?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"(?:(?:\d+:)?\d+:)?\d+(?:\.\d+)?")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
_KNOWN = (
    "messages (chats, OpenAI), conversations (LLaVA), question with options or answer, or text or caption with an "
    "image or video"
)


def read_record(
    record: Any, *, template: str = DEFAULT_TEMPLATE, marks: Sequence[str] = (), answered: bool = True
) -> Chat:
    """Return the conversation of a record.

    Args:
        record: decoded JSON, or the row of a table.
        template: the text of multiple-choice questions, see `DEFAULT_TEMPLATE`.
        marks: strings that no text may contain.
        answered: whether the last message must be an answer, and no answer may be empty. Otherwise, a question without
            an answer has an empty one.

    Raises:
        DataError: the layout of the record is unknown, media and placeholders do not match, or a message is malformed.
    """
    if not isinstance(record, Mapping):
        raise DataError(f'is {record!r:.60}; needs "messages", a list of {{"role": ..., "content": ...}}')
    allowed = replace(FILES, marks=marks)
    messages = _messages(record, template, answered)
    _refuse(record, _UNSUPPORTED_KEYS, _OUTSIDE, _IN_PARTS)
    chat = Chat.parse(messages, allowed)
    if not chat.media:
        remedy = "give its path by 'video' or 'image', or leave the key out if the text is about no video"
        named = filter(_NAMES_MEDIA.fullmatch, record)
        stated = [key for key in named if record[key] != 0 or _NUMBERS_MEDIA.search(key)]
        _refuse(record, stated, "but shows no video or image", remedy)
    if answered:
        chat.check_targets()
    else:
        chat.check_order(answered=False)
    system = record.get("system")
    if not _has_content(system):
        return chat
    if not isinstance(system, str):
        raise DataError(f"system is {system!r:.60}; expected a text, which becomes the first message")
    if chat.turns[0].role == "system":
        raise DataError(f"has the key 'system' ({system!r:.60}) and a system message; give one of them")
    return Chat(Chat.parse([{"role": "system", "content": system}], allowed).turns + chat.turns)


def _messages(record: Mapping[str, Any], template: str, answered: bool) -> Any:
    """Return the messages of a record in our layout."""
    layouts = [key for key in ("messages", "conversations", "question") if key in record]
    if len(layouts) > 1:
        raise DataError(f"has {' and '.join(layouts)}, so its format is ambiguous; expected one of {_KNOWN}")
    if layouts == ["messages"]:
        return _from_messages(record)
    if layouts == ["conversations"]:
        return _fill(list(_turns(record["conversations"])), record)
    if layouts == ["question"]:
        return _question(record, template, answered)
    media = _media(record)
    caption = next((record[key] for key in ("text", "caption") if isinstance(record.get(key), str)), None)
    if caption is not None and media:
        return _ask(record, media, CAPTION_PROMPT.format(kind=media[0]["type"]), caption)
    keys = ", ".join(map(repr, list(record)[:8])) or "none"
    raise DataError(f"has the keys {keys}, which is not a known format; expected {_KNOWN}")


def _from_messages(record: Mapping[str, Any]) -> Any:
    messages, sampling, shown = record["messages"], _sampling_keys(record), list[Any]()
    names = [*_MEDIA_KEYS["image"], *_MEDIA_KEYS["video"]]
    if isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages):
        messages = [plain_message(message) for message in messages]
        media_keys = [key for key in record if record[key] and (key in names or _FILE_NAME.search(key))]
        to_fill = [part for message in messages for part in _split(message) if _is_open(part)]
        own = [part for message in messages for part in _parts(message) if _is_open(part)]
        # Without lists of files, `Chat.parse` states the place of a part without a path. Texts have no such place.
        if len(to_fill) > len(own) or (to_fill and media_keys):
            messages, sampling = _fill(messages, record), []
            names = [key for key in names if key not in media_keys]
        shown = [part.get("path") for message in messages for part in _parts(message) if isinstance(part, Mapping)]
    unread = [key for key in names if any(name not in shown for name in _listed(record.get(key)))]
    _refuse(record, unread, _OUTSIDE, _IN_PARTS)
    _refuse(record, sampling, _OUTSIDE, _BESIDE_PATH)
    return messages


def _has_content(value: Any) -> bool:
    """Return whether a value is not null, an empty text or list, or NaN, which stand for absent ones in tables."""
    return bool(value == value) if isinstance(value, (int, float)) else bool(value)


def _refuse(record: Mapping[str, Any], keys: Iterable[str], where: str, remedy: str) -> None:
    """Raise DataError if one of these keys has content other than false, which nothing reads; `where` says why."""
    if stated := next((key for key in keys if record.get(key) is not False and _has_content(record.get(key))), None):
        raise DataError(f"has {stated} {record[stated]!r:.60} {where}, so it would be ignored; {remedy}")


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of OpenAI, Qwen or lmms-eval in our layout; what is unknown or ambiguous is kept."""
    result = without_nulls(message)
    if result.get("role") == "developer":
        result["role"] = "system"
    if isinstance(result.get("content"), list):
        result["content"] = [plain_part(part) if isinstance(part, Mapping) else part for part in result["content"]]
    return result


def plain_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of such a message in our layout."""
    given = without_nulls(part)
    kind = given.get("type")
    if kind in _TEXT_PARTS:
        return {**given, "type": "text"}
    if not isinstance(kind, str) or kind not in _MEDIA_PARTS:
        return given
    media = _MEDIA_PARTS[kind]
    names = {key for key in (kind, f"{media}_url", media, "url") if key in given}
    if len(names) != 1:
        return {**given, "type": media}
    # `detail` has no effect, so it may be stated beside the object and inside it.
    merged = with_members({key: given[key] for key in given if key != "detail"}, *names)
    if {"path", "images"} & set(merged):
        return {**given, "type": media}
    value = merged.get("url")
    rest = {key: merged[key] for key in merged if key not in ("type", "detail", "url", *_ALL_CLIP_KEYS)}
    return {"type": media, ("images" if isinstance(value, list) else "path"): value, **rest, **_clip(merged)}


def _turns(conversations: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(conversations, list) or not conversations:
        raise DataError('conversations is not a list; expected [{"from": "human", "value": ...}, ...]')
    for number, turn in enumerate(conversations):
        turn = without_nulls(turn) if isinstance(turn, Mapping) else {}
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(speaker, str) or speaker not in _ROLES or not isinstance(text, str):
            raise DataError(
                f"turn {number} of conversations is from {speaker!r} with the value {text!r:.40}; expected a text from "
                "human, gpt or system"
            )
        # A weight may state what is done anyway: answers have the weight 1, and other turns 0.
        is_target = _ROLES[speaker] == "assistant"
        given = [key for key in _TURN_KEYS if _has_content(turn.get(key))]
        if weights := [key for key in given if key not in _TURN_WEIGHTS or turn[key] != is_target]:
            raise DataError(
                f"turn {number} of conversations has {weights[0]} {turn[weights[0]]!r:.60}, which would be ignored; "
                "all answers are targets with the same weight, so leave the key or the record out"
            )
        yield {"role": _ROLES[speaker], "content": text}


def _question(record: Mapping[str, Any], template: str, answered: bool) -> list[dict[str, Any]]:
    if any(key in record for key in OPTION_KEYS):
        choice = read_choice(record)
        if choice.answer is None and answered:
            raise DataError(f"the question has no answer; expected one of {', '.join(ANSWER_KEYS)}")
        question, answer = choice.prompt(template), "" if choice.answer is None else choice.letters[choice.answer]
    else:
        question, answer = record["question"], record["answer"] if _has_content(record.get("answer")) else ""
        others = [key for key in ANSWER_KEYS if key != "answer" and record.get(key) != answer]
        unread = [key for key in record if _ONE_OPTION.fullmatch(key) or key in others]
        remedy = f"give the options as one list, by {', '.join(map(repr, OPTION_KEYS))}, or an open answer by 'answer'"
        _refuse(record, unread, "but no list of options", remedy)
        if not isinstance(question, str) or not isinstance(answer, str) or (answered and not answer):
            raise DataError(f"question and answer are {question!r:.40} and {answer!r:.40}; expected two texts")
    if _PLACEHOLDER.search(question):
        return _fill([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], record)
    return _ask(record, _media(record), question, answer)


def _ask(
    record: Mapping[str, Any], media: Sequence[dict[str, Any]], question: str, answer: str
) -> list[dict[str, Any]]:
    _check_sampling(record, media)
    content = [*media, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _media(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the media parts that the keys of a record name, images first."""
    parts: list[dict[str, Any]] = []
    sampling = {key: _number(record[key]) for key in FRAME_FIELDS if record.get(key) is not None} | _clip(record)
    named: Mapping[str, Any] = record
    if not any(record.get(key) for keys in _MEDIA_KEYS.values() for key in keys):
        # Beside other media, columns that name files only describe these, as in COCO.
        names = [name for key in record if _FILE_NAME.search(key) and record[key] for name in _listed(record[key])]
        named = {"image": sorted(names, key=lambda name: Path(str(name)).suffix.lower() in VIDEO_SUFFIXES)}
    for kind, keys in _MEDIA_KEYS.items():
        key = _only([key for key in keys if named.get(key)])
        for value in _listed(named[key]) if key else ():
            name = value.get("path") if isinstance(value, Mapping) else value
            if not isinstance(name, str):
                raise DataError(f"{key} is {value!r:.60}; expected the path of a file, or a list of paths")
            # LLaVA's video data sometimes name a video by the key of images.
            part_kind = "video" if Path(name).suffix.lower() in VIDEO_SUFFIXES else kind
            parts.append({"type": part_kind, "path": name, **(sampling if part_kind == "video" else {})})
    if not parts and isinstance(name := record.get("videoID", record.get("video_id")), str):
        parts.append({"type": "video", "path": VIDEO_ID + name, **sampling})
    videos = sum(part["type"] == "video" for part in parts)
    if videos > 1 and sampling.keys() & _CLIP_KEYS.keys():
        raise DataError(f"has the times of a clip and {videos} videos; state start and end in the part of each video")
    return parts


def _check_sampling(record: Mapping[str, Any], media: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError if a record without a video of its own states which frames of it are used."""
    if all(part["type"] != "video" for part in media):
        remedy = "leave it out, or null in rows of a table without a video"
        _refuse(record, _sampling_keys(record), "but names no video", remedy)


def _sampling_keys(record: Mapping[str, Any]) -> list[str]:
    """Return the keys that may say which frames of a video are used.

    A start of 0 s is that of every video, and a date is not a time in a video.
    """
    keys = [key for key in _SAMPLING_KEYS if not _DATE.match(str(record.get(key)))]
    return [key for key in keys if key not in _CLIP_KEYS["start"] or _number(record.get(key)) != 0]


def _clip(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the start and the end of a clip in seconds, from numbers or from texts such as "1:02:03.5"."""
    keys = {name: _only([key for key in keys if given.get(key) is not None]) for name, keys in _CLIP_KEYS.items()}
    return {name: _number(given[key]) for name, key in keys.items() if key}


def _only(keys: Sequence[str]) -> str | None:
    """Return the key that states something, if there is one."""
    if len(keys) > 1:
        raise DataError(f"has both {keys[0]!r} and {keys[1]!r}; give one of them")
    return next(iter(keys), None)


def _number(value: Any) -> Any:
    """Return the number that a cell of a table states, as a text in CSV, or as a float beside nulls in pandas."""
    if isinstance(value, str) and _TIME.fullmatch(value.strip()):
        seconds = 0.0
        for part in value.split(":"):
            seconds = 60 * seconds + float(part)
        value = seconds
    # `Chat.parse` says what is wrong with other values
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _is_open(part: Any) -> bool:
    """Return whether a part shows an image or video of the record's own list."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "video") and not {"path", "images"} & set(part)


def _fill(messages: list[dict[str, Any]], record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return messages in which each placeholder of a user's text is replaced by the next file of its kind.

    If all files are videos and all placeholders are `<image>`, these stand for the videos, as in LLaVA's video data. A
    line break next to a placeholder belongs to it.
    """
    media = _media(record)
    _check_sampling(record, media)
    split = [_split(message) for message in messages]
    placeholders = [part["type"] for content in split for part in content if _is_open(part)]
    available = {kind: [part for part in media if part["type"] == kind] for kind in _MEDIA_KEYS}
    if available["video"] and not available["image"] and "video" not in placeholders:
        available = {"image": available["video"], "video": []}
    for kind, parts in available.items():
        if placeholders.count(kind) != len(parts):
            files = ", ".join(part["path"] for part in media)
            marks = ", ".join(f"<{x}>" for x in placeholders)
            raise DataError(
                f"has {len(media)} files ({files:.120}) and the placeholders {marks or 'none'}; write one for each "
                "file, where it is shown, and none for a part that names its own file"
            )
    queues = {kind: iter(parts) for kind, parts in available.items()}
    return [
        {**message, "content": [next(queues[part["type"]]) if _is_open(part) else part for part in content]}
        if any(_is_open(part) for part in content)
        else message
        for message, content in zip(messages, split, strict=True)
    ]


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else []


def _split(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message; the texts of a user are divided at their placeholders."""
    parts: list[Any] = []
    for part in _parts(message):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if message.get("role") != "user" or not isinstance(text, str) or not _PLACEHOLDER.search(text):
            parts.append(part)
            continue
        pieces = enumerate(_PLACEHOLDER.split(text))  # text, kind, text, ...
        parts += [{"type": x} if number % 2 else {"type": "text", "text": x} for number, x in pieces if x]
    return parts
