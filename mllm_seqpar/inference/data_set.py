"""Answers to a data set of questions: many videos, many questions each, on groups of ranks that work independently.

The groups take turns with the videos. The ranks of a group encode a video together, and answer all questions about it,
whose common beginning stays in the KV cache. A video or question that cannot be used gets a line with an error, on
which the ranks of the group agree. Groups communicate only at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from mllm_seqpar.cli.progress import note, progress_bar, say
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import DataError

from .answer_file import AnswerFile, Line
from .arguments import AskArguments
from .choices import accuracy_table, letter_log_likelihoods
from .conversation import Conversation
from .engine import Engine
from .questions import Question, QuestionSet, media_names
from .rank_groups import RankGroups, tried

_SETTINGS = "fps num_frames max_frames max_new_tokens temperature top_p seed choices template dtype".split()
"""Options on which an answer depends; strategies, kernels and numbers of ranks change it by rounding at most."""


def answer_data_set(args: AskArguments, world: Communicator, device: torch.device) -> int:
    """Answer the questions of `args.questions` that `args.output` has no answer to. Every rank calls this.

    Returns:
        On rank 0, the number of questions without an answer; on the other ranks, 0.

    Raises:
        SeqParError: on all ranks, if the questions, the model or the output cannot be used.
    """
    engine = Engine(args, world, device)
    ranks = engine.ranks
    questions, settings = agree(world, "inputs", lambda: _open(args, engine), lambda found: found[1])
    with closing(AnswerFile(args.output or "")) as file:
        done = _resume(file, settings, ranks)
        videos = [[question for question in group if question.index not in done] for group in questions.by_media()]
        mine = [group for group in videos if group][ranks.index :: ranks.count]
        if mine:
            engine.load()
            Answerer(args, engine, questions).answer_all(mine, file)
        agree(ranks.end, "output", file.close_part)
        return agree(ranks.end, "output", lambda: _finish(file, questions, ranks))


class Answerer:
    """Answers questions of a data set, on the ranks of one group."""

    def __init__(self, args: AskArguments, engine: Engine, questions: QuestionSet) -> None:
        self._args, self._engine, self._questions = args, engine, questions

    def answer_all(self, videos: Sequence[Sequence[Question]], file: AnswerFile) -> None:
        """Write the answers to the questions of this group of ranks, which are grouped by their media."""
        ranks, total = self._engine.ranks, sum(map(len, videos))
        title = "answering" if ranks.count == 1 else f"answering, group 1 of {ranks.count}"
        with progress_bar(total, "question", title, self._args.progress and ranks.world.rank == 0) as bar:
            for questions in videos:
                for line in self.lines(questions):
                    if ranks.group.rank == 0:
                        file.write(line)
                    bar.update()

    def lines(self, questions: Sequence[Question]) -> Iterator[Line]:
        """Yield the answer to each of several questions about the same videos and images, which are encoded once."""
        conversation, fault = tried(self._engine.comm, "media", lambda: self._encoded(questions[0]))
        for question in questions:
            yield self._line(conversation, question, fault)

    def _encoded(self, question: Question) -> Conversation:
        conversation = self._engine.open(partial(self._questions.sources, question))
        conversation.encode()
        return conversation

    def _line(self, conversation: Conversation | None, question: Question, fault: str | None) -> Line:
        named = {} if question.id is None else {"id": question.id}
        line: Line = {"index": question.index, **named, "media": media_names(question), "question": question.text}
        fault = question.fault or fault
        if self._args.choices and question.choice is None:
            fault = fault or "the question has no options to choose from"
        prompt = None
        if conversation is not None and fault is None:
            limit = 1 if self._args.choices else self._args.max_new_tokens
            prompt, fault = tried(self._engine.comm, "prompt", lambda: conversation.prompt(question.messages, limit))
        if conversation is None or prompt is None:
            return {**line, "place": question.place, "error": fault}
        return line | (self._chosen if self._args.choices else self._generated)(conversation, prompt, question)

    def _generated(self, conversation: Conversation, prompt: Any, question: Question) -> Line:
        reply = conversation.answer(prompt, self._args.sampling())
        lengths = {"prompt_tokens": reply.prompt_tokens, "answer_tokens": len(reply.tokens)}
        line = {"answer": reply.text, "finish_reason": reply.finish_reason, "frames": conversation.frames, **lengths}
        return line if question.reference is None else {**line, "reference": question.reference}

    def _chosen(self, conversation: Conversation, prompt: Any, question: Question) -> Line:
        assert question.choice is not None  # `_line` has checked it
        letters = question.choice.letters
        scores = letter_log_likelihoods(conversation, prompt, self._engine.family.tokenizer, letters)
        best = max(letters, key=scores.__getitem__)
        line: Line = {"answer": best, "log_likelihoods": scores, "frames": conversation.frames}
        if question.choice.answer is not None:
            reference = letters[question.choice.answer]
            line |= {"reference": reference, "correct": best == reference}
        return line | ({"categories": dict(question.categories)} if question.categories else {})


def _open(args: AskArguments, engine: Engine) -> tuple[QuestionSet, dict[str, Any]]:
    """Return the questions, and what the answers depend on."""
    questions = QuestionSet(args, engine.processor)
    settings = {"model": engine.digest, "questions": questions.digest}
    settings |= {name: getattr(args, name) for name in _SETTINGS}
    return questions, {**settings, "star": args.self_attention == "star"}


def _resume(file: AnswerFile, settings: dict[str, Any], ranks: RankGroups) -> set[int]:
    """Open the file on all ranks; return the numbers of the questions that it has answers to."""
    world = ranks.world
    answered = agree(world, "output", lambda: [*file.resume(settings)] if world.rank == 0 else [])
    done = json.loads(world.gather_texts(json.dumps(answered))[0])
    agree(world, "output", lambda: file.open(ranks.index) if ranks.group.rank == 0 else None)
    agree(world, "output", lambda: file.require_parts(ranks.count) if world.rank == 0 else None)
    return set(done)


def _finish(file: AnswerFile, questions: QuestionSet, ranks: RankGroups) -> int:
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
