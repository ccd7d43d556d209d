"""The questions of a data set, grouped by the videos and images that they ask about.

A record is read as training reads it (`mllm_seqpar.data.formats`), but needs no answer. The answer that a record has to
its last question is the reference. If a record is a conversation of several turns, its last question is asked, with the
earlier turns as context.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mllm_seqpar.data.chat import ChatDataset
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.data.chat_format import check_record, media_parts, part_files
from mllm_seqpar.data.formats import CATEGORY_KEYS, OPTION_KEYS, MultipleChoice, read_choice, to_chat
from mllm_seqpar.data.sources import FrameSource
from mllm_seqpar.errors import ConfigError, DataError, SeqParError

from .arguments import AskArguments

_ID_KEYS = ("id", "question_id", "qid")
_GROUPING_KEYS = ("duration", "duration_group", *CATEGORY_KEYS, "sub_category")
"""Columns by which accuracy is reported."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question of a data set.

    Attributes:
        index: the number of the record, from 0.
        place: the place of the record, for messages; FILE:LINE of JSONL.
        id: the record's own id, if it has one.
        messages: system, user and earlier assistant messages; the last is the user's.
        reference: the answer of the record, if it has one.
        choice: the options of a multiple-choice question.
        categories: the columns by which accuracy is reported.
        fault: why the record is not a question; it then has no messages.
    """

    index: int
    place: str
    id: str | int | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    reference: str | None = None
    choice: MultipleChoice | None = None
    categories: Mapping[str, str] = field(default_factory=dict)
    fault: str | None = None

    @property
    def text(self) -> str:
        """The text of the last message."""
        return _text(self.messages[-1]["content"]) if self.messages else ""

    @property
    def media(self) -> list[Mapping[str, Any]]:
        return media_parts(self.messages)


class QuestionSet:
    """The questions of a data set in any form that training reads.

    Args:
        args: `questions`, `media_root`, `template`, `choices` and the frame options.
        processor: the model's.

    Raises:
        ConfigError: no question has options, and they are asked for.
        DataError: the data set cannot be read.
    """

    def __init__(self, args: AskArguments, processor: Any) -> None:
        assert args.questions is not None  # the caller's condition
        options: dict[str, Any] = {"media_root": args.media_root, "template": args.template, "on_bad_media": "skip"}
        sampling = {name: getattr(args, name) for name in ("fps", "num_frames", "max_frames")}
        self._dataset = ChatDataset(args.questions, processor, **options, **sampling, **args.decoding(), validate=False)
        self.digest = self._dataset.digest
        self._marks, self._template = chat_family(processor).marks, args.template
        self.questions = [self._question(index) for index in range(len(self._dataset))]
        if args.choices and not any(question.choice for question in self.questions):
            keys = ", ".join(OPTION_KEYS)
            raise ConfigError(
                f"--choices: no record of {args.questions} is a question with options ({keys}); leave it out"
            )

    def by_media(self) -> list[list[Question]]:
        """Return the questions grouped by their media; groups are in the order of their first questions."""
        groups: dict[Any, list[Question]] = {}
        for question in self.questions:
            groups.setdefault(self._key(question), []).append(question)
        return list(groups.values())

    def sources(self, question: Question) -> list[FrameSource]:
        """Return the frames of the question's media; VideoError if a file is missing or unreadable."""
        return [self._dataset.source(question.index, part) for part in question.media]

    def _question(self, index: int) -> Question:
        place = self._dataset.records.place(index)
        try:
            record = self._dataset.records.record(index)
        except DataError as error:
            return Question(index=index, place=place, fault=str(error))
        columns = record if isinstance(record, Mapping) else {}
        name = next((columns[key] for key in _ID_KEYS if isinstance(columns.get(key), (str, int))), None)
        try:
            chat = to_chat(record, template=self._template, answered=False)
            messages = check_record(chat, None, self._marks, answered=False)
            choice = read_choice(columns) if _has_options(columns) else None
            reference = None
            if messages[-1]["role"] == "assistant":
                *messages, last = messages
                reference = _text(last["content"]) or None
            if not messages or messages[-1]["role"] != "user":
                raise DataError("has no question; its last message, apart from an answer, must be the user's")
        except DataError as error:
            return Question(index=index, place=place, id=name, fault=str(error))
        categories = {key: str(columns[key]) for key in _GROUPING_KEYS if isinstance(columns.get(key), _kinds(key))}
        found: dict[str, Any] = {"reference": reference, "choice": choice, "categories": categories}
        return Question(index=index, place=place, id=name, messages=tuple(messages), **found)

    def _key(self, question: Question) -> Hashable:
        """Return a key that is equal for equal files with equal sampling."""
        try:
            return tuple(self._dataset.identify(question.index, part) for part in question.media)
        except SeqParError:  # a file is missing, and `sources` will say so
            return tuple(media_names(question)), "missing"


def media_names(question: Question) -> list[str]:
    """Return the names of the files that a question asks about, as its record writes them."""
    return [name for part in question.media for name in part_files(part)]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _has_options(columns: Mapping[str, Any]) -> bool:
    return "question" in columns and any(key in columns for key in OPTION_KEYS)


def _kinds(key: str) -> tuple[type, ...]:
    return (str,) if key == "duration" else (str, int)  # a number is a time, which is not a category
