"""What processors, data sets and the collator share: roles, parts, who shows media, and which tokens are answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mllm_seqpar.errors import DataError

Span = tuple[int, int]
"""The first character of a range, and the one after its last."""

ROLES = ("system", "user", "assistant")

PartKeys = Mapping[str, Collection[str] | None]
"""The kinds of parts that a message may have, each with the keys by which such a part names its medium and says how to
read it; None for any keys. Texts are always allowed."""


def message_parts(number: int, message: Any, media: PartKeys) -> list[Mapping[str, Any]]:
    """Return the parts of a message; a text is one part.

    Args:
        number: of the message in its conversation.
        message: {"role": ..., "content": text, or a list of parts}.
        media: what parts the message may have. A key whose value is None counts as absent.

    Raises:
        DataError: an unknown role, part or key, or media in a message that is not the user's; begins with the message.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise DataError(f"message {number} has the role {role!r}; expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, (list, tuple)) or not content:
        raise DataError(f"message {number} holds {content!r:.80}; expected a text or a list of parts")
    for part in content:
        if fault := _part_fault(part, role, media):
            raise DataError(f"message {number} ({role}) {fault}")
    return list(content)


def order_fault(roles: Sequence[str], *, answered: bool = True) -> str | None:
    """Return what is wrong with the order of the messages of a chat, or None.

    Args:
        roles: of all messages.
        answered: whether the last message must be an answer.
    """
    for number, role in enumerate(roles):
        before = roles[number - 1] if number else None
        if role == "system" and before not in (None, "system"):
            return f"message {number} (system) follows one of the {before}; a system prompt comes first"
        if role == "assistant" and before != "user":
            after = "is the first message" if before in (None, "system") else "follows another answer"
            return f"message {number} (assistant) {after}; expected a message of the user, with the media, before it"
    if answered and roles[-1] != "assistant":
        return (
            f"message {len(roles) - 1} ({roles[-1]}) is the last one and has no answer; add the answer, or leave the "
            "message out"
        )
    return None


def _part_fault(part: Any, role: str, media: PartKeys) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" and (not isinstance(kind, str) or kind not in media):
        return (
            f"holds {part!r:.80}, which is not a part; a part has the type {', '.join(dict.fromkeys(['text', *media]))}"
        )
    if kind == "text" and not isinstance(part.get("text"), str):
        return f'holds a text part without text, {part!r:.80}; expected {{"type": "text", "text": ...}}'
    known = media.get(kind)
    if known is not None:
        known = {"type", *known}
        if unknown := sorted(str(key) for key, value in part.items() if value is not None and key not in known):
            return f"has the unknown key {unknown[0]!r} in {part!r:.80}; a part of type {kind} takes {sorted(known)}"
    if kind != "text" and role != "user":
        return f"has a part of type {kind}; only a user message shows media"
    return None


def target_mask(offsets: Any, spans: Sequence[Sequence[Span]]) -> list[list[int]]:
    """Return 1 for each token whose characters overlap a span, as transformers' mask of the assistant's tokens has.

    Args:
        offsets: (B, L, 2), the range of characters of each token; empty for padding and for added tokens.
        spans: the character ranges of the answers of each sample.
    """
    rows = []
    for row, marked in zip(offsets, spans, strict=True):
        begin, end = np.asarray(row).reshape(-1, 2).T
        found = np.zeros(len(begin), dtype=bool)
        for first, last in marked:
            found |= (begin < last) & (end > first)
        rows.append(found.astype(int).tolist())
    return rows
