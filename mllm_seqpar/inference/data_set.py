"""Answers to a data set of questions: many videos, many questions each, on groups of ranks that work independently.

The groups take turns with the videos. The ranks of a group encode a video together, and answer all questions about it,
whose common beginning stays in the KV cache. A video or question that cannot be used gets a line with an error, on
which the ranks of the group agree. Groups communicate only before the first video and after the last.

A record is read as training reads it (`mllm_seqpar.chats.forms`), but needs no answer. The answer that a record has
to its last question is the reference. If a record is a conversation of several turns, its last question is asked, with
the earlier turns as context.

The answer file has one JSON object a line, and a run that stopped is resumed from it. Group 0 appends each answer to
the file itself, and every other group of ranks appends to its own part next to it, so that all answers survive a
crash. When a run starts, it collects the answers of all parts, and drops a last line that was not written completely.
When it ends, it writes all answers in the order of the questions. A second file records what the answers depend on, so
that a run with another model or other options is refused. It is locked during the run, so that a second run with the
same output is refused too.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch

from mllm_seqpar.chats.chat import Chat
from mllm_seqpar.chats.chat_family import ChatText
from mllm_seqpar.chats.clip import Clip, FrameSource
from mllm_seqpar.chats.data_set import ChatDataset
from mllm_seqpar.chats.forms import read_record
from mllm_seqpar.chats.multiple_choice import CATEGORY_KEYS, OPTION_KEYS, MultipleChoice, read_choice
from mllm_seqpar.cli.outputs import stream_descriptor
from mllm_seqpar.cli.progress import note, progress_bar, say
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError, DataError, SeqParError, first_line, writing
from mllm_seqpar.videos.files import require_made_with

from .arguments import AskOptions
from .choices import accuracy_table, letter_log_likelihoods
from .conversation import Conversation
from .engine import DividedRanks, Engine
from .evidence import evidence_values
from .generation import Sampling
from .job import JobError

_ID_KEYS = ("id", "question_id", "qid")
_GROUPING_KEYS = ("duration", "duration_group", *CATEGORY_KEYS, "sub_category")
"""Columns by which accuracy is reported."""

T = TypeVar("T")
Line = dict[str, Any]
"""An answer: "index" is the number of its question; "error" says why there is no answer."""

_SETTINGS = "fps num_frames max_frames max_new_tokens temperature top_p seed choices template dtype".split()
"""Options on which an answer depends; strategies, kernels and numbers of ranks change it by rounding at most."""


def answer_data_set(args: AskOptions, world: Communicator, device: torch.device) -> int:
    """Answer the questions of `args.questions` that `args.output` has no answer to. Every rank calls this.

    Returns:
        On rank 0, the number of questions without an answer; on the other ranks, 0.

    Raises:
        SeqParError: on all ranks, if the questions, the model or the output cannot be used.
    """
    engine = Engine(args, world, device)
    ranks = engine.ranks
    questions = agree(world, "inputs", lambda: QuestionSet(args, engine), lambda read: read.settings)
    with closing(AnswerFile(args.output or "")) as file:
        answered = agree(world, "output", lambda: [*file.resume(questions.settings)] if world.rank == 0 else [])
        done = {*json.loads(world.gather_texts(json.dumps(answered))[0])}
        agree(world, "output", lambda: file.open(ranks.index) if ranks.group.rank == 0 else None)
        agree(world, "output", lambda: file.require_parts(ranks.count) if world.rank == 0 else None)
        videos = [[question for question in group if question.index not in done] for group in questions.by_media()]
        mine = [group for group in videos if group][ranks.index :: ranks.count]
        if mine:
            engine.load()
            Answerer(args, engine, questions).answer_all(mine, file)
        agree(ranks.end, "output", file.close_part)
        return agree(ranks.end, "output", lambda: _finish(file, questions, ranks))


class Answerer:
    """Answers questions of a data set, on the ranks of one group."""

    def __init__(self, args: AskOptions, engine: Engine, questions: QuestionSet) -> None:
        self._args, self._engine, self._questions = args, engine, questions
        self._sampling = Sampling(max_new_tokens=1) if args.choices else args.sampling()

    def answer_all(self, videos: Sequence[Sequence[Question]], file: AnswerFile) -> None:
        """Write the answers to the questions of this group of ranks, which are grouped by their media."""
        ranks, total = self._engine.ranks, sum(map(len, videos))
        title = "answering" if ranks.count == 1 else f"answering, group 1 of {ranks.count}"
        with progress_bar(total, "question", title, self._args.progress and ranks.world.rank == 0) as bar:
            for questions in videos:
                for question, outcome in zip(questions, self._outcomes(questions), strict=True):
                    line = self._line(question, outcome)
                    if ranks.group.rank == 0:
                        file.write(line)
                    bar.update()

    def _line(self, question: Question, outcome: Line | str) -> Line:
        """Return the line of a question with an answer, or why there is none."""
        if isinstance(outcome, str):
            outcome = {"place": question.place, "error": outcome}
        named = {} if question.id is None else {"id": question.id}
        return {"index": question.index, **named, "media": media_names(question), "question": question.text, **outcome}

    def _outcomes(self, questions: Sequence[Question]) -> Iterator[Line | str]:
        """Yield the answer to each of these questions, whose media are encoded once, or why there is none."""
        engine, faults = self._engine, [question.fault or "" for question in questions]
        prompts: list[ChatText | str] = [*faults]
        if not all(faults):
            try:
                conversation = engine.settled(partial(engine.open, partial(self._questions.sources, questions[0])))
                for number, question in enumerate(questions):
                    if not faults[number]:
                        messages, length = question.chat.to_json(), self._sampling.max_new_tokens
                        prompt = _or_reason(engine.settled, partial(conversation.prompt, messages, length))
                        prompts[number] = prompt
                if not all(isinstance(prompt, str) for prompt in prompts):
                    engine.settled(conversation.encode)
            except JobError as error:
                prompts = [fault or _reason(error) for fault in faults]
        answer = self._choose if self._args.choices else self._write
        for question, prompt in zip(questions, prompts, strict=True):
            if isinstance(prompt, str):
                yield prompt
            else:
                yield _or_reason(engine.computed, partial(answer, question, conversation, prompt))

    def _write(self, question: Question, conversation: Conversation, prompt: ChatText) -> Line:
        """Return the answer in words."""
        reply = conversation.answer(prompt, self._sampling, evidence=self._args.evidence)
        lengths = {"prompt_tokens": reply.prompt_tokens, "answer_tokens": len(reply.tokens)}
        line = {"answer": reply.text, "finish_reason": reply.finish_reason, "frames": conversation.frames, **lengths}
        line |= evidence_values(reply.evidence) if self._args.evidence else {}
        return line if question.reference is None else {**line, "reference": question.reference}

    def _choose(self, question: Question, conversation: Conversation, prompt: ChatText) -> Line:
        """Return the letter of an option."""
        assert question.choice is not None  # or it has a fault
        letters = question.choice.letters
        scores = letter_log_likelihoods(conversation, prompt, conversation.tokenizer, letters)
        best = max(letters, key=scores.__getitem__)
        line: Line = {"answer": best, "log_likelihoods": scores, "frames": conversation.frames}
        if question.choice.answer is not None:
            reference = letters[question.choice.answer]
            line |= {"reference": reference, "correct": best == reference}
        return line | ({"categories": dict(question.categories)} if question.categories else {})


def _or_reason(run: Callable[[Callable[[], T]], T], step: Callable[[], T]) -> T | str:
    """Return ``run(step)``, or why a question has no answer."""
    try:
        return run(step)
    except JobError as error:
        return _reason(error)


def _reason(error: JobError) -> str:
    """Return why a question has no answer; raise the cause if it is not of the question."""
    if not error.of_the_input:
        error.raise_cause()
    return first_line(error)


def _finish(file: AnswerFile, questions: QuestionSet, ranks: DividedRanks) -> int:
    """Write the answers in the order of the questions, and report them, on rank 0; return the number of errors."""
    if ranks.world.rank:
        return 0
    lines = file.finish()
    faults = [line for line in lines if "error" in line]
    if any("log_likelihoods" in line for line in lines):
        say(accuracy_table(lines) + "\n")
    blind = sum(line.get("frames") == 0 for line in lines)
    text = f"{file.path}: {len(lines) - len(faults)} of {len(questions.questions)} questions are answered"
    if blind:
        text += f"; without a video or image, because their records name none: {blind}"
    if faults:
        text += f"; errors: {len(faults)}, the first at {faults[0]['place']}: {faults[0]['error']}"
        text += "; the same command asks these questions again"
    if faults and len(faults) == len(lines):
        raise DataError(text)
    note(text)
    return len(faults)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question of a data set."""

    index: int  # the number of the record, from 0
    place: str  # of the record, for messages; FILE:LINE of JSONL
    id: str | int | None = None
    chat: Chat = Chat(())  # the last message is the user's
    reference: str | None = None  # the answer of the record
    choice: MultipleChoice | None = None
    categories: Mapping[str, str] = field(default_factory=dict)
    fault: str | None = None  # why it cannot be asked

    @property
    def text(self) -> str:
        """The text of the last message."""
        return self.chat.turns[-1].text if self.chat.turns else ""

    @property
    def media(self) -> list[Clip]:
        return self.chat.media


class QuestionSet:
    """The questions of a data set in any form that training reads; `settings` are what their answers depend on.

    Raises:
        ConfigError: no question has options, and they are asked for.
        DataError: the data set cannot be read.
    """

    def __init__(self, args: AskOptions, engine: Engine) -> None:
        assert args.questions is not None  # the caller's condition
        options: dict[str, Any] = {"media_root": args.media_root, "template": args.template, "on_bad_media": "skip"}
        options |= {name: getattr(args, name) for name in ("fps", "num_frames", "max_frames")} | args.decoding()
        self._dataset = ChatDataset(args.questions, engine.processor, **options, validate=False)
        self.settings: dict[str, Any] = {"model": engine.digest, "questions": self._dataset.digest}
        self.settings |= {name: getattr(args, name) for name in _SETTINGS}
        self.settings |= {"evidence": args.evidence or None, "star": args.self_attention == "star"}
        self._marks, self._template, self._choices = engine.chat_format.marks, args.template, args.choices
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
        return [self._dataset.source(question.index, medium) for medium in question.media]

    def _question(self, index: int) -> Question:
        place = self._dataset.records.place(index)
        name = None
        try:
            record = self._dataset.records.record(index)
            columns = record if isinstance(record, Mapping) else {}
            name = next((columns[key] for key in _ID_KEYS if isinstance(columns.get(key), (str, int))), None)
            chat = read_record(record, template=self._template, marks=self._marks, answered=False)
            has_options = "question" in columns and any(key in columns for key in OPTION_KEYS)
            choice = read_choice(columns) if has_options else None
            turns = list(chat.turns)
            reference = (turns.pop().text or None) if turns[-1].role == "assistant" else None
            if not turns or turns[-1].role != "user":
                raise DataError("has no question; its last message, apart from an answer, must be the user's")
        except DataError as error:
            return Question(index=index, place=place, id=name, fault=str(error))
        categories = {
            key: str(columns[key])
            for key in _GROUPING_KEYS  # a duration that is a number is a time, which is not a category
            if isinstance(columns.get(key), str if key == "duration" else (str, int))
        }
        facts: dict[str, Any] = {"reference": reference, "choice": choice, "categories": categories}
        if self._choices and choice is None:
            facts["fault"] = "the question has no options to choose from"
        return Question(index=index, place=place, id=name, chat=Chat(tuple(turns)), **facts)

    def _key(self, question: Question) -> Hashable:
        """Return a key that is equal for equal files with equal sampling."""
        try:
            return tuple(self._dataset.identify(question.index, medium) for medium in question.media)
        except SeqParError:  # a file is missing, and `sources` will say so
            return tuple(media_names(question)), "missing"


def media_names(question: Question) -> list[str]:
    """Return the names of the files that a question asks about, as its record writes them."""
    return [name for medium in question.media for name in medium.files]


class AnswerFile:
    """The answers of one run, in the file `path` and its parts; directories are created."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._settings = self.path.with_name(self.path.name + ".settings.json")
        self._file: TextIO | None = None
        self._locked: TextIO | None = None

    def resume(self, settings: Mapping[str, Any]) -> dict[int, Line]:
        """Return the answers of an earlier run with the same settings, and collect them in the file. Call this on one
        process only.

        Lines with an error are dropped: their questions are asked again.

        Raises:
            ConfigError: the file has answers that were made with other settings, another run is writing to it, it is
                not a regular file, or it cannot be written.
            DataError: a line of the file is not an answer.
        """
        if stream_descriptor(self.path) is not None or (self.path.exists() and not self.path.is_file()):
            raise ConfigError(
                f"--output {self.path}: not a regular file, so a run could not be resumed from it; give a regular file"
            )
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self._locked = self._settings.open("a+", encoding="utf-8")
            self._lock(file)
            done = self._collect()
            answered = {index: line for index, line in done.items() if "error" not in line}
            if answered or (not done and self.path.exists() and self.path.stat().st_size):
                files = ", ".join(str(path) for path in (self.path, *self._parts()) if path.exists())
                remedy = f"give another --output, or delete {files} to begin again"
                file.seek(0)
                try:
                    earlier = dict(json.loads(file.read()))
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"{self.path}: it is not empty, and {self._settings.name}, which says what its answers were "
                        f"made with, cannot be read; {remedy}"
                    ) from error
                require_made_with(f"{self.path}: its answers", earlier, settings, remedy, ConfigError)
            else:
                file.truncate(0)
                file.write(json.dumps(dict(settings), indent=1) + "\n")
                file.flush()
            self._write_all(answered.values())
        return answered

    def open(self, group: int) -> None:
        """Open this group's part for appending."""
        path = self._part(group)
        with self._writing(path):
            self._file = path.open("a", encoding="utf-8")

    def require_parts(self, groups: int) -> None:
        """Raise ConfigError unless this process finds the parts that all groups of ranks have opened."""
        missing = [path for path in map(self._part, range(groups)) if not path.exists()]
        if missing:
            raise ConfigError(
                f"--output: {missing[0]}, which another node has created, is not visible here; give a path on a file "
                "system that all nodes share"
            )

    def write(self, line: Line) -> None:
        """Append an answer to this group's part in one write; raise ConfigError if that fails."""
        assert self._file is not None  # `open` precedes
        with self._writing():
            self._file.write(_encoded(line))
            self._file.flush()

    def close_part(self) -> None:
        """Close this group's part, if it is open; raise ConfigError if it could not be written."""
        file, self._file = self._file, None
        if file is not None:
            with self._writing():
                file.close()

    def close(self) -> None:
        """Close the part and release the lock, at the end of a run, even if it failed."""
        with suppress(ConfigError):
            self.close_part()
        if self._locked is not None:
            with suppress(OSError):  # what could not be written is written again
                self._locked.close()

    def finish(self) -> list[Line]:
        """Write the answers of all parts in the order of the questions, delete the parts, and return the answers.

        Call this on one process only, after `close_part` on all.
        """
        with self._writing():
            lines = [line for _, line in sorted(self._collect().items())]
            self._write_all(lines)
        return lines

    def _writing(self, path: Path | None = None) -> AbstractContextManager[None]:
        remedy = "answers that it has are kept; make it writable and start again, or give another --output"
        return writing(path or self.path, "", remedy, ConfigError)

    def _part(self, group: int) -> Path:
        return self.path.with_name(f"{self.path.name}.part-{group}") if group else self.path

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part-*"))

    def _collect(self) -> dict[int, Line]:
        """Return the lines of the file and all parts by the number of their question; an answer replaces an error."""
        found: dict[int, Line] = {}
        for path in (self.path, *self._parts()):
            for line in _read(path):
                if line["index"] not in found or "error" in found[line["index"]]:
                    found[line["index"]] = line
        return found

    def _write_all(self, lines: Iterable[Line]) -> None:
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text("".join(map(_encoded, lines)), encoding="utf-8")
        os.replace(temporary, self.path)
        for part in self._parts():
            part.unlink()

    def _lock(self, file: TextIO) -> None:
        """Lock a file until it is closed, if the file system supports it; raise ConfigError if another process holds
        the lock."""
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(
                f"{self.path}: another run is writing its answers there; wait until it ends, or give another --output"
            ) from error
        except OSError:  # a file system without locks
            pass


def _encoded(line: Line) -> str:
    text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair as JSON escapes it


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _read(path: Path) -> list[Line]:
    """Return the lines of a file, without a last line that was not written completely."""
    rows = path.read_bytes().split(b"\n") if path.exists() else [b""]
    lines: list[Line] = []
    for number, row in enumerate(rows[:-1], 1):  # what follows the last line break is incomplete, or empty
        try:
            line = json.loads(row, parse_constant=_refuse_constant)
            if not isinstance(line, dict) or not isinstance(line.get("index"), int):
                raise ValueError('expected an object with "index"')
        except ValueError as error:
            if number == len(rows) - 1:  # a machine that stops may leave its last block unwritten
                break
            raise DataError(f"{path}:{number}: not an answer ({error}); give another --output") from error
        lines.append(line)
    return lines
