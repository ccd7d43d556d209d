"""What one record of a data set looks like: our form of a conversation, and other forms, which are converted to it.

Our form is one conversation about videos and images:

    {"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": "..."}]}

Media parts:

- {"type": "video", "path": FILE}, optionally with "fps", "num_frames" or "max_frames" for this video, and with "start"
  and "end", seconds, for a clip of it
- {"type": "video", "images": [FILE, ...]}, a list of images as a video
- {"type": "image", "path": FILE}, one frame, or one frame per tile if the model's processor cuts images into tiles

A path may be a URL. Relative paths start at the folder of the JSONL file. A record may have further keys, such as an
id, but no keys that name media or tools outside the messages. Messages and parts have no further keys.

`to_chat` detects other forms (LLaVA, OpenAI, questions, captions, multiple choice) and converts them, and
`check_record` validates the result. If a form is unknown, the error names what was found. `records` reads data sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mllm_seqpar.chats.messages import message_parts, order_fault
from mllm_seqpar.errors import ConfigError, DataError, VideoError
from mllm_seqpar.videos.frame_choice import FRAME_FIELDS, FrameChoice
from mllm_seqpar.videos.media_files import VIDEO_SUFFIXES

from .records import VIDEO_ID

_Source = TypeVar("_Source")
_Check = Callable[[str], object] | None

_PART_KEYS = dict.fromkeys(("image", "video"), ("path", "images", *FRAME_FIELDS))  # some are refused by name
_PART_KEYS["text"] = ("text",)
_REFUSED_KEYS = {"image", "images", "video", "videos", "audio", "audios", "tools", "system", *FRAME_FIELDS}
"""Keys of other formats whose content would be ignored."""

OPTION_KEYS = ("options", "candidates", "choices")
ANSWER_KEYS = ("answer", "correct_choice", "correct_answer", "answer_index")
CATEGORY_KEYS = ("task_type", "question_category", "category", "domain", "question_type")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

DEFAULT_TEMPLATE = "{question}\n{options}\nReply with the letter of the correct option."
"""The text of a question: `{question}`, and `{options}` with one option on each line, "A. ..."."""

_LETTERED = re.compile(r"^\(?([A-Z])[.):]\)?\s*(.*)$", re.DOTALL)

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

_ALL_CLIP_KEYS = tuple(key for keys in _CLIP_KEYS.values() for key in keys)
_PLACEHOLDER = re.compile(r"\n?<\|?(image|video)\|?>\n?")
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


def to_chat(record: Any, *, template: str = DEFAULT_TEMPLATE, answered: bool = True) -> Mapping[str, Any]:
    """Return a record in our form; a record that already has this form is returned unchanged.

    Args:
        record: decoded JSON, or the row of a table.
        template: the text of multiple-choice questions, see `DEFAULT_TEMPLATE`.
        answered: whether a question must have an answer; without one, the message of the assistant is empty.

    Raises:
        DataError: the format of the record is unknown, or media and placeholders do not match.
    """
    if not isinstance(record, Mapping):
        raise DataError(f'is {record!r:.60}; needs "messages", a list of {{"role": ..., "content": ...}}')
    forms = [key for key in ("messages", "conversations", "question") if key in record]
    if len(forms) > 1:
        raise DataError(f"has {' and '.join(forms)}, so its format is ambiguous; expected one of {_KNOWN}")
    if forms == ["messages"]:
        return _from_messages(record)
    if forms == ["conversations"]:
        return {"messages": _fill(list(_turns(record["conversations"])), record)}
    if forms == ["question"]:
        return {"messages": _question(record, template, answered)}
    media = _media(record)
    caption = next((record[key] for key in ("text", "caption") if isinstance(record.get(key), str)), None)
    if caption is not None and media:
        prompt = CAPTION_PROMPT.format(kind=media[0]["type"])
        return {"messages": _ask(media, prompt, caption)}
    keys = ", ".join(map(repr, list(record)[:8])) or "none"
    raise DataError(f"has the keys {keys}, which is not a known format; expected {_KNOWN}")


def _from_messages(record: Mapping[str, Any]) -> Mapping[str, Any]:
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return record  # `check_record` says what is wrong
    converted = [_message(message) for message in messages]
    names = [*_MEDIA_KEYS["image"], *_MEDIA_KEYS["video"]]
    media_keys = [key for key in record if record[key] and (key in names or _FILE_NAME.search(key))]
    if media_keys and any(_expects_media(message) for message in converted):
        rest = {key: value for key, value in record.items() if key not in (*media_keys, *FRAME_FIELDS, *_ALL_CLIP_KEYS)}
        return {**rest, "messages": _fill(converted, record)}
    return {**record, "messages": converted}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with parts in our form; unknown keys are kept, and `check_record` names them."""
    result = _without_nulls(message)
    if result.get("role") == "developer":
        result["role"] = "system"
    if isinstance(result.get("content"), list):
        result["content"] = [_part(part) if isinstance(part, Mapping) else part for part in result["content"]]
    return result


def _without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a message, a turn or a part that it has; tables store null for the others."""
    return {key: value for key, value in given.items() if value is not None}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    given = _without_nulls(part)
    kind = given.get("type")
    if kind in _TEXT_PARTS:
        return {**given, "type": "text"}
    if not isinstance(kind, str) or kind not in _MEDIA_PARTS:
        return given
    media = _MEDIA_PARTS[kind]
    names = {key for key in (kind, f"{media}_url", media, "url") if key in given}
    if len(names) != 1 or {"path", "images"} & set(given):  # with two sources, `check_record` names the unknown key
        return {**given, "type": media}
    (source,) = names
    value = given[source]
    if isinstance(value, Mapping):  # {"url": ..., "detail": ...}
        value = value.get("url")
    rest = {key: given[key] for key in given if key not in ("type", "detail", source, *_ALL_CLIP_KEYS)} | _clip(given)
    return {"type": media, ("images" if isinstance(value, list) else "path"): value, **rest}


def _turns(conversations: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(conversations, list) or not conversations:
        raise DataError('conversations is not a list; expected [{"from": "human", "value": ...}, ...]')
    for number, turn in enumerate(conversations):
        turn = _without_nulls(turn) if isinstance(turn, Mapping) else {}
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(speaker, str) or speaker not in _ROLES or not isinstance(text, str):
            raise DataError(
                f"turn {number} of conversations is from {speaker!r} with the value {text!r:.40}; expected a text from "
                "human, gpt or system"
            )
        yield {"role": _ROLES[speaker], "content": text}


def _question(record: Mapping[str, Any], template: str, answered: bool) -> list[dict[str, Any]]:
    if any(key in record for key in OPTION_KEYS):
        choice = read_choice(record)
        if choice.answer is None and answered:
            raise DataError(f"the question has no answer; expected one of {', '.join(ANSWER_KEYS)}")
        question, answer = choice.prompt(template), "" if choice.answer is None else choice.letters[choice.answer]
    else:
        question, answer = record["question"], record.get("answer") or ""
        if not isinstance(question, str) or not isinstance(answer, str) or (answered and not answer):
            raise DataError(f"question and answer are {question!r:.40} and {answer!r:.40}; expected two texts")
    if _PLACEHOLDER.search(question):
        return _fill([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], record)
    return _ask(_media(record), question, answer)


def _ask(media: Sequence[dict[str, Any]], question: str, answer: str) -> list[dict[str, Any]]:
    content = [*media, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _media(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the media parts that the keys of a record name, images first."""
    parts: list[dict[str, Any]] = []
    sampling = {key: _number(record[key]) for key in FRAME_FIELDS if record.get(key) is not None} | _clip(record)
    record = _with_file_names(record)
    for kind, keys in _MEDIA_KEYS.items():
        found = [key for key in keys if record.get(key)]
        if len(found) > 1:
            raise DataError(f"has both {found[0]!r} and {found[1]!r}; give one of them")
        for value in _listed(record[found[0]]) if found else ():
            name = value.get("path") if isinstance(value, Mapping) else value
            if not isinstance(name, str):
                raise DataError(f"{found[0]} is {value!r:.60}; expected the path of a file, or a list of paths")
            # LLaVA's video data sometimes name a video by the key of images.
            part_kind = "video" if Path(name).suffix.lower() in VIDEO_SUFFIXES else kind
            parts.append({"type": part_kind, "path": name, **(sampling if part_kind == "video" else {})})
    if not parts and isinstance(name := record.get("videoID", record.get("video_id")), str):
        parts.append({"type": "video", "path": VIDEO_ID + name, **sampling})
    videos = sum(part["type"] == "video" for part in parts)
    if videos > 1 and sampling.keys() & _CLIP_KEYS.keys():
        raise DataError(f"has the times of a clip and {videos} videos; state start and end in the part of each video")
    return parts


def _with_file_names(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record with `image` or `video` instead of columns that name files, if no other key has media.

    Beside other media, such a column only describes them, as in COCO.
    """
    if any(record.get(key) for keys in _MEDIA_KEYS.values() for key in keys):
        return record
    result: dict[str, Any] = {}
    for key, value in record.items():
        if not _FILE_NAME.search(key):
            result[key] = value
            continue
        for name in _listed(value) if value else ():
            kind = "video" if Path(str(name)).suffix.lower() in VIDEO_SUFFIXES else "image"
            result.setdefault(kind, []).append(name)
    return result


def _clip(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the start and the end of a clip in seconds, from numbers or from texts such as "1:02:03.5"."""
    found: dict[str, Any] = {}
    for name, keys in _CLIP_KEYS.items():
        stated = [key for key in keys if given.get(key) is not None]
        if len(stated) > 1:
            raise DataError(f"has both {stated[0]!r} and {stated[1]!r}; give one of them")
        if stated:
            found[name] = _number(given[stated[0]])
    return found


def _number(value: Any) -> Any:
    """Return the number that a cell of a table states, as a text in CSV, or as a float beside nulls in pandas."""
    if isinstance(value, str) and _TIME.fullmatch(value.strip()):
        seconds = 0.0
        for part in value.split(":"):
            seconds = 60 * seconds + float(part)
        value = seconds
    # `check_record` says what is wrong with other values
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _expects_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        return message.get("role") == "user" and bool(_PLACEHOLDER.search(content))
    return isinstance(content, list) and any(_is_open(part) for part in content)


def _is_open(part: Any) -> bool:
    """Return whether a part shows an image or video of the record's own list."""
    return isinstance(part, Mapping) and part.get("type") in _MEDIA_KEYS and not {"path", "images"} & set(part)


def _fill(messages: list[dict[str, Any]], record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return messages in which each placeholder of a user's text is replaced by the next file of its kind.

    If all files are videos and all placeholders are `<image>`, these stand for the videos, as in LLaVA's video data. A
    line break next to a placeholder belongs to it.
    """
    media = _media(record)
    split = [_split(message) for message in messages]
    wanted = [part["type"] for content in split for part in content if _is_open(part)]
    available = {kind: [part for part in media if part["type"] == kind] for kind in _MEDIA_KEYS}
    if available["video"] and not available["image"] and "video" not in wanted:
        available = {"image": available["video"], "video": []}
    for kind, parts in available.items():
        if wanted.count(kind) != len(parts):
            raise DataError(
                f"has {len(media)} files ({', '.join(part['path'] for part in media)!s:.120}) and the placeholders "
                f"{', '.join(f'<{name}>' for name in wanted) or 'none'}; write one for each file, where it is shown"
            )
    queues = {kind: iter(parts) for kind, parts in available.items()}
    return [
        {**message, "content": [next(queues[part["type"]]) if _is_open(part) else part for part in content]}
        if any(_is_open(part) for part in content)
        else message
        for message, content in zip(messages, split, strict=True)
    ]


def _split(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message; a user's text is divided at its placeholders."""
    content = message.get("content")
    if not isinstance(content, str):
        return content if isinstance(content, list) else []
    if message.get("role") != "user":
        return [{"type": "text", "text": content}]
    pieces = _PLACEHOLDER.split(content)
    parts = [
        {"type": "text", "text": text} if number % 2 == 0 else {"type": text} for number, text in enumerate(pieces)
    ]
    return [part for part in parts if part.get("text") != ""]


def check_record(
    record: Any, check_file: Callable[[str], object] | None = None, marks: Sequence[str] = (), *, answered: bool = True
) -> list[Mapping[str, Any]]:
    """Return the messages of one decoded line; no text may contain `marks`.

    Args:
        check_file: called with the name of each file; raises VideoError if it does not exist. None: not checked.
        answered: whether messages of the assistant are required, and the last one is theirs.

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
    if fault := order_fault([message["role"] for message in messages], answered=answered):
        raise DataError(fault)
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


def check_template(template: str) -> None:
    """Raise ConfigError unless `template` has the field {question}, and only fields of `DEFAULT_TEMPLATE`."""
    found = re.findall(r"\{(\w*)\}", template)
    unknown = [name for name in found if name not in ("question", "options")]
    if unknown or "question" not in found:
        problem = f"the field {{{unknown[0]}}} is unknown" if unknown else "it has no {question}"
        raise ConfigError(
            f"--template {template!r}: {problem}; it takes {{question}}, which is required, and {{options}}"
        )


@dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    """A question with lettered options.

    Attributes:
        question: the text, without the options.
        options: the texts of the options, without their letters.
        answer: the number of the correct option from 0; None if the record has no answer.
        category: the kind of question, if the record has one.
    """

    question: str
    options: tuple[str, ...]
    answer: int | None
    category: str | None

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(LETTERS[: len(self.options)])

    def prompt(self, template: str = DEFAULT_TEMPLATE) -> str:
        """Return the question with its options."""
        lines = "\n".join(f"{letter}. {text}" for letter, text in zip(self.letters, self.options, strict=True))
        values = {"question": self.question, "options": lines}
        return re.sub(r"\{(question|options)\}", lambda found: values[found[1]], template)


def read_choice(record: Mapping[str, Any]) -> MultipleChoice:
    """Return the question of a record with `question` and one of `OPTION_KEYS`.

    Raises:
        DataError: there are no usable options, or the answer is not one of them, or is ambiguous.
    """
    key = next(key for key in OPTION_KEYS if key in record)
    options = record[key]
    if isinstance(options, Mapping):  # {"A": "red", "B": "blue"}
        options = [f"{letter}. {text}" for letter, text in options.items()]
    valid = isinstance(options, (list, tuple)) and all(isinstance(text, str) and text.strip() for text in options)
    if not valid or not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"{key} is {options!r:.80}; expected a list of 2 to {len(LETTERS)} texts")
    texts = [text.strip() for text in options]
    found = [_LETTERED.match(text) for text in texts]
    if all(match and match[1] == LETTERS[number] for number, match in enumerate(found)):
        texts = [match[2].strip() for match in found if match]
    named = [key for key in ANSWER_KEYS if record.get(key) is not None]
    category = next((record[key] for key in CATEGORY_KEYS if isinstance(record.get(key), str)), None)
    return MultipleChoice(
        question=str(record["question"]).strip(),
        options=tuple(texts),
        answer=_answer(record[named[0]], texts, named[0]) if named else None,
        category=category,
    )


def _answer(value: Any, options: list[str], key: str) -> int:
    """Return the number of the option that an answer means: a number from 0, a letter, or the option's text."""
    if type(value) is int:
        if 0 <= value < len(options):
            return value
        raise DataError(f"{key} is {value}, of {len(options)} options; a number counts from 0, or give a letter")
    text = str(value).strip()
    letters = LETTERS[: len(options)]
    by_letter = (
        [letters.index(text.strip("().:"))] if len(text.strip("().:")) == 1 and text.strip("().:") in letters else []
    )
    lettered = _LETTERED.match(text)
    if not by_letter and lettered and lettered[1] in letters and options[letters.index(lettered[1])] == lettered[2]:
        by_letter = [letters.index(lettered[1])]
    by_text = [number for number, option in enumerate(options) if option == text]
    found = set(by_letter) | set(by_text)
    if len(found) != 1:
        why = "is ambiguous" if found else "is none of the options"
        raise DataError(f"{key} is {value!r:.60}, which {why} ({', '.join(options)!s:.120}); give a letter or a number")
    return found.pop()
