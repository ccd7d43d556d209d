"""Multiple choice by log-likelihood: the letter that most likely begins the answer, and the accuracy over questions.

The log-likelihood of a letter is the logarithm of the summed probabilities of its spellings, the token sequences by
which it can follow the prompt: with and without a space before it. If a spelling has several tokens, their
log-probabilities are summed. No spelling is the beginning of another one, so none counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mllm_seqpar.chats.chat_family import ChatText

from .conversation import Conversation

_TAIL = 8
"""The number of tokens at the end of a prompt that determine how the tokenizer splits the following text."""


def spellings(tokenizer: Any, prompt: Sequence[int], text: str) -> list[list[int]]:
    """Return the token sequences by which `text`, with or without a space before it, can follow the tokens of a prompt.

    None of them begins with another one. If the tokenizer would join the text with the end of the prompt, the tokens
    of the text alone are used.
    """
    ways: list[list[int]] = []
    for spelled in (text, f" {text}"):
        tokens = continuation(tokenizer, prompt, spelled)
        if tokens and tokens not in ways:
            ways.append(tokens)
    ways = ways or [tokenizer.encode(text, add_special_tokens=False)]
    return [tokens for tokens in ways if not any(tokens[: len(o)] == o for o in ways if o is not tokens)]


def continuation(tokenizer: Any, prompt: Sequence[int], text: str) -> list[int] | None:
    """Return the tokens of `text` after a prompt; None if the tokenizer would join it with the end of the prompt."""
    tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    before, both = (tokenizer.encode(part, add_special_tokens=False) for part in (tail, tail + text))
    return both[len(before) :] if both[: len(before)] == before else None


def letter_log_likelihoods(
    conversation: Conversation, prompt: ChatText, tokenizer: Any, letters: Sequence[str]
) -> dict[str, float]:
    """Return the log-likelihood of each letter as the beginning of the answer to a prompt.

    Every rank of the model's group calls this with the same prompt.
    """
    ids = prompt.input_ids[0].tolist()
    spelled = [(letter, tokens) for letter in letters for tokens in spellings(tokenizer, ids, letter)]
    scores = conversation.log_likelihoods(prompt, [tokens for _, tokens in spelled])
    by_letter: dict[str, list[float]] = {letter: [] for letter in letters}
    for (letter, _), score in zip(spelled, scores, strict=True):
        by_letter[letter].append(score.log_likelihood)
    return {letter: float(torch.tensor(values).double().logsumexp(0)) for letter, values in by_letter.items()}


def accuracy_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the accuracy over all lines of answers that have a reference, and by each of their categories."""
    scored = [line for line in lines if "correct" in line]
    if not scored:
        return "accuracy: no question has a correct answer to compare with"
    groups: dict[tuple[str, str], list[bool]] = {}
    for line in scored:
        for group in (("accuracy", ""), *line.get("categories", {}).items()):
            groups.setdefault(group, []).append(line["correct"])
    names = list(dict.fromkeys(name for name, _ in groups))
    rows = [
        (name, value, f"{sum(correct) / len(correct):7.2%} ({sum(correct)} of {len(correct)})")
        for (name, value), correct in sorted(groups.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {score}" for name, value, score in rows)
