"""Conversations about videos and images, and the only reader of their messages.

    [{"role": "user", "content": [{"type": "video", "path": "a.mp4", "fps": 2}, {"type": "text", "text": "What?"}]},
     {"role": "assistant", "content": "It."}]

Data sets, collators, processors, the server and evaluations differ in what they allow (`Allowed`): a record names
files, and an example of a collator may hold images. All else is the same. Other layouts become messages in `forms`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.videos.frame_choice import FRAME_FIELDS, FrameChoice

from .clip import Clip

ROLES = ("system", "user", "assistant")
_SURROGATE = re.compile("[\ud800-\udfff]")


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 10


@dataclass(frozen=True)
class Turn:
    """A message. Its content is a text, or texts and media in order."""

    role: str
    content: str | tuple[str | Clip, ...]

    @property
    def parts(self) -> tuple[str | Clip, ...]:
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def media(self) -> list[Clip]:
        return [part for part in self.parts if isinstance(part, Clip)]

    @property
    def text(self) -> str:
        """All texts, without the media."""
        return "".join(part for part in self.parts if isinstance(part, str))

    def to_json(self) -> dict[str, Any]:
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        parts = [{"type": "text", "text": x} if isinstance(x, str) else x.to_json() for x in self.content]
        return {"role": self.role, "content": parts}


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What messages may contain.

    Attributes:
        sources: the kinds of media, each with the keys that may name or hold the medium, the first one that is there
            counts; None for any keys.
        files: whether each medium must be a file or, of a video, a list of files.
        other_keys: whether messages may have keys besides role and content.
        marks: strings that no text may contain.
    """

    sources: Mapping[str, Sequence[str] | None]
    files: bool = False
    other_keys: bool = True
    marks: Collection[str] = ()


FILES = Allowed(sources=dict.fromkeys(("image", "video"), ("path", "images")), files=True, other_keys=False)
"""Messages of a data set."""

ANY_MEDIA = Allowed(sources={"image": None, "video": None})
"""Messages whose media are passed beside them, or read by others."""


class MessageError(DataError):
    """A message is malformed.

    Attributes:
        fault: what is wrong, without the place.
        place: the number of the message, then that of its part, then the key, as far as the fault has them.
    """

    def __init__(self, fault: str, place: Sequence[Any], role: str | None = None) -> None:
        super().__init__(f"message {place[0]} {'' if role is None else f'({role}) '}{fault}")
        self.fault, self.place = fault, tuple(place)


@dataclass(frozen=True)
class Chat:
    """A conversation, which is not changed."""

    turns: tuple[Turn, ...]

    @classmethod
    def parse(cls, messages: Any, allowed: Allowed = ANY_MEDIA) -> Chat:
        """Return the conversation of messages; a key whose value is None counts as absent, as in tables.

        Raises:
            DataError: there are no messages.
            MessageError: an unknown role, part or key, media in a message that is not the user's, or a choice of frames
                that is not possible.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise DataError('needs "messages", a list of {"role": ..., "content": ...}')
        return cls(tuple(_turn(number, message, allowed) for number, message in enumerate(messages)))

    @property
    def media(self) -> list[Clip]:
        return [medium for turn in self.turns for medium in turn.media]

    def with_media(self, media: Iterable[Clip]) -> Chat:
        """Return the conversation with other media instead of its own, in order."""
        following = iter(media)

        def shown(turn: Turn) -> Turn:
            return Turn(turn.role, tuple(x if isinstance(x, str) else next(following) for x in turn.content))

        return Chat(tuple(shown(turn) if turn.media else turn for turn in self.turns))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the messages; their media must be files, or passed beside them."""
        return [turn.to_json() for turn in self.turns]

    def check_order(self, *, answered: bool = True) -> None:
        """Raise MessageError for an order of roles that no chat has; with `answered`, unless the last is an answer."""
        before = None
        for number, turn in enumerate(self.turns, 1):
            fault = None
            if turn.role == "system" and before not in (None, "system"):
                fault = f"follows one of the {before}; a system prompt comes first"
            elif turn.role == "assistant" and before != "user":
                fault = "is the first message" if before in (None, "system") else "follows another answer"
                fault += "; expected a message of the user, with the media, before it"
            elif answered and number == len(self.turns) and turn.role != "assistant":
                fault = "is the last one and has no answer; add the answer, or leave the message out"
            if fault is not None:
                raise MessageError(fault, [number - 1], turn.role)
            before = turn.role

    def check_targets(self) -> None:
        """Raise DataError unless the conversation ends with an answer, and none of its answers is empty."""
        if all(turn.role != "assistant" for turn in self.turns):
            raise DataError("has no message of the assistant, so there are no target tokens")
        self.check_order()
        for number, turn in enumerate(self.turns):
            if turn.role == "assistant" and not turn.text.strip():
                fault = "is empty, which would only train the model to end its answer"
                remedy = "give the answer, or leave the message or the record out"
                raise MessageError(f"{fault}; {remedy}", [number], turn.role)


def without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a message or a part that it has; tables store null for the others."""
    return {key: value for key, value in given.items() if value is not None}


def with_members(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a part whose key `name` is an object, such as {"url": "a.mp4", "fps": 2}, with the object's keys instead.

    Any other value of `name` is the URL.

    Raises:
        DataError: the part and the object have a key in common.
    """
    part = without_nulls(part)
    value = part.pop(name, None)
    members = without_nulls(value if isinstance(value, Mapping) else {"url": value})
    if twice := sorted(part.keys() & members.keys()):
        raise DataError(f"has a part in which {twice[0]} is given twice; give it once")
    return part | members


def _shown(value: Any) -> str:
    return f"{_SHORT.repr(value):.80}"  # a data: URL may be long


def _turn(number: int, message: Any, allowed: Allowed) -> Turn:
    message = without_nulls(message) if isinstance(message, Mapping) else {}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise MessageError(f"has the role {role!r}; expected one of {', '.join(ROLES)}", [number, "role"])
    if not isinstance(content, str) and not (isinstance(content, (list, tuple)) and content):
        raise MessageError(f"holds {_shown(content)}; expected a text or a list of parts", [number, "content"])
    parts = [
        _part(part, role, allowed, [number, index])
        for index, part in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]
    if not allowed.other_keys and (unknown := sorted(map(str, message.keys() - {"role", "content"}))):
        fault = f"has the unknown key {unknown[0]!r}; a message has role and content"
        raise MessageError(fault, [number, unknown[0]], role)
    return Turn(role, content if isinstance(content, str) else tuple(parts))


def _part(part: Any, role: str, allowed: Allowed, place: list[int]) -> str | Clip:
    def fault(text: str, *key: str) -> MessageError:
        return MessageError(text, [*place, *key], role)

    given = without_nulls(part) if isinstance(part, Mapping) else {}
    kind = given.get("type")
    kinds = ["text", *allowed.sources]
    if kind not in kinds:
        raise fault(f"holds {_shown(part)}, which is not a part; a part has the type {', '.join(kinds)}")
    names = ["text"] if kind == "text" else allowed.sources[kind]
    if kind == "text" and not isinstance(given.get("text"), str):
        raise fault(f'holds a text part without text, {_shown(part)}; expected {{"type": "text", "text": ...}}', "text")
    if names is not None:
        known = ["type", *names, *(() if kind == "text" else FRAME_FIELDS)]
        if unknown := sorted(str(key) for key in given if key not in known):
            text = f"has the unknown key {unknown[0]!r} in {_shown(part)}; a part of type {kind} takes {sorted(known)}"
            raise fault(text, unknown[0])
    if kind == "text":
        if marks := [mark for mark in allowed.marks if mark in given["text"]]:
            raise fault(f"has {marks[0]} in its text; show media by parts, and leave the model's own marks out", "text")
        if half := _SURROGATE.search(given["text"]):  # JSON may have it, but it is in no encoding and no tokenizer
            raise fault(f"has {half[0]!r} in its text, which is half of a character; leave it out", "text")
        return str(given["text"])
    if role != "user":
        raise fault(f"has a part of type {kind}; only a user message shows media")
    if names is None:
        return Clip(kind)
    keys = [name for name in names if name in given]
    source = given[keys[0]] if keys else None
    if allowed.files:
        listed = source if kind == "video" and keys == ["images"] else [source]
        if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
            needed = f'needs "{names[0]}", a file' + (', or "images", a list' if kind == "video" else "")
            raise fault(f"has a part of type {kind}, which {needed}", names[0])
        if len(keys) > 1:
            raise fault(f'has a part of type {kind} with both "path" and "images"; give one of them', keys[1])
        source = tuple(listed) if keys == ["images"] else source
    if kind.startswith("image") and (stated := [name for name in FRAME_FIELDS if name in given]):
        raise fault(f"has a part of type {kind} with {stated[0]}; only a video takes it", stated[0])
    try:
        frames = FrameChoice.of(given)
        if isinstance(source, (list, tuple)):
            frames.sampled(source)
    except ConfigError as error:
        raise fault(f"has a part of type {kind} with {error}", str(error).partition(":")[0]) from error
    return Clip(kind, source, frames)
