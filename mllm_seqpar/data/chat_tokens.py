"""Conversations written as text and cut into tokens, and which of the tokens are the assistant's words.

The text is tokenised whole, as a family's processor does it. A chat grows by its end only: what is written for the
first messages is how the text for all of them begins. So the words of an answer are what the text has gained between
the opening of the answer and its end, and tokens are matched to them by their offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import DataError

Write = Callable[[Sequence[dict[str, Any]], bool], str]
"""(messages, whether to open an answer at the end) -> text."""

Span = tuple[int, int]


def answer_spans(messages: Sequence[dict[str, Any]], write: Write) -> list[Span]:
    """Where in ``write(messages, False)`` the assistant's words and their ends are.

    Raises:
        DataError: a later message changes what is written for earlier ones.
    """
    whole, spans = write(messages, False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened, closed = write(messages[:number], True), write(messages[: number + 1], False)
        if not (closed.startswith(opened) and whole.startswith(closed)):
            raise DataError(
                f"message {number}: the chat template writes earlier messages differently when later ones follow, so "
                "the answers cannot be told from the rest; use a template that only adds at the end"
            )
        spans.append((len(opened), len(closed)))
    return spans


def tokenise(
    tokenizer: Any,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]] | None,
    *,
    padding_side: str | None,
    add_special_tokens: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(input_ids, attention_mask, labels), (B, L) each; without `spans` no labels.

    Raises:
        DataError: a tokenizer that cannot pad several texts, or that does not know where tokens come from.
    """
    if len(texts) > 1 and tokenizer.pad_token_id is None:
        raise DataError("the tokenizer has no pad token, so texts of different lengths make no batch; set pad_token")
    if spans is not None and not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, so the assistant's words "
            "cannot be found; use the fast tokenizer (tokenizer.json) of this model"
        )
    side = {} if padding_side is None else {"padding_side": padding_side}
    made = tokenizer(
        list(texts),
        padding=len(texts) > 1,
        return_tensors="pt",
        add_special_tokens=add_special_tokens,
        return_token_type_ids=False,
        return_attention_mask=True,
        return_offsets_mapping=spans is not None,
        **side,
    )
    ids = made["input_ids"]
    labels = None if spans is None else _labels(ids, made["offset_mapping"], spans)
    return ids, made["attention_mask"], labels


def _labels(ids: Tensor, offsets: Tensor, spans: Sequence[Sequence[Span]]) -> Tensor:
    """A token counts when it begins within an answer; padding, and what a tokenizer adds, comes from no character."""
    begin, end = offsets[..., 0], offsets[..., 1]
    learned = torch.zeros_like(ids, dtype=torch.bool)
    for sample, own in enumerate(spans):
        for start, stop in own:
            learned[sample] |= (begin[sample] >= start) & (begin[sample] < stop)
    return ids.masked_fill(~(learned & (end > begin)), -100)
