"""Questions with lettered options: the text that a model is asked, and the option that an answer means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mllm_seqpar.errors import ConfigError, DataError

OPTION_KEYS = ("options", "candidates", "choices")
ANSWER_KEYS = ("answer", "correct_choice", "correct_answer", "answer_index")
CATEGORY_KEYS = ("task_type", "question_category", "category", "domain", "question_type")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

DEFAULT_TEMPLATE = "{question}\n{options}\nReply with the letter of the correct option."
"""The text of a question: `{question}`, and `{options}` with one option on each line, "A. ..."."""

_LETTERED = re.compile(r"^\(?([A-Z])[.):]\)?\s*(.*)$", re.DOTALL)


def check_template(template: str) -> None:
    """Raise ConfigError unless `template` has the field {question}, and only fields of `DEFAULT_TEMPLATE`."""
    names = re.findall(r"\{(\w*)\}", template)
    unknown = [name for name in names if name not in ("question", "options")]
    if unknown or "question" not in names:
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
        return re.sub(r"\{(question|options)\}", lambda field: values[field[1]], template)


def read_choice(record: Mapping[str, Any]) -> MultipleChoice:
    """Return the question of a record with `question` and one of `OPTION_KEYS`.

    Raises:
        DataError: there are no usable options, an answer is not one of them or ambiguous, or two answers differ.
    """
    key = next(key for key in OPTION_KEYS if key in record)
    options = record[key]
    if isinstance(options, Mapping):  # {"A": "red", "B": "blue"}
        options = [f"{letter}. {text}" for letter, text in options.items()]
    valid = isinstance(options, (list, tuple)) and all(isinstance(text, str) and text.strip() for text in options)
    if not valid or not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"{key} is {options!r:.80}; expected a list of 2 to {len(LETTERS)} texts")
    texts = [text.strip() for text in options]
    lettered = [_LETTERED.match(text) for text in texts]
    if all(match and match[1] == LETTERS[number] for number, match in enumerate(lettered)):
        texts = [match[2].strip() for match in lettered if match]
    named = [key for key in ANSWER_KEYS if record.get(key) is not None]
    named = [key for key in named if record[key] != ""] or named
    answers = [_answer(record[key], texts, key) for key in named]
    for key, answer in zip(named, answers, strict=True):
        if answer != answers[0]:
            raise DataError(
                f"{named[0]} is {record[named[0]]!r:.60}, but {key} is {record[key]!r:.60}, which is another option; "
                "give one of them"
            )
    category = next((record[key] for key in CATEGORY_KEYS if isinstance(record.get(key), str)), None)
    return MultipleChoice(
        question=str(record["question"]).strip(),
        options=tuple(texts),
        answer=answers[0] if answers else None,
        category=category,
    )


def _answer(value: Any, options: list[str], key: str) -> int:
    """Return the number of the option that an answer means: a number from 0, a letter, or the option's text."""
    if type(value) is int:
        if not 0 <= value < len(options):
            raise DataError(f"{key} is {value}, of {len(options)} options; a number counts from 0, or give a letter")
        return value
    text = str(value).strip()
    lettered = _LETTERED.match(text)
    meant = [
        number
        for number, (letter, option) in enumerate(zip(LETTERS, options, strict=False))
        if text == option or text.strip("().:") == letter or (lettered and lettered.groups() == (letter, option))
    ]
    if len(meant) != 1:
        why = "is ambiguous" if meant else "is none of the options"
        raise DataError(f"{key} is {value!r:.60}, which {why} ({', '.join(options)!s:.120}); give a letter or a number")
    return meant[0]
