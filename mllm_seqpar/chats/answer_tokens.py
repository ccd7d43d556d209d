"""Which tokens of a tokenized conversation are answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Span = tuple[int, int]
"""The first character of a range, and the one after its last."""


def target_mask(offsets: Any, spans: Sequence[Sequence[Span]]) -> list[list[int]]:
    """Return 1 for each token whose characters overlap a span, as transformers' mask of the assistant's tokens has.

    Args:
        offsets: (B, L, 2), the range of characters of each token; empty for padding and for added tokens.
        spans: the character ranges of the answers of each sample.
    """
    rows = []
    for row, answers in zip(offsets, spans, strict=True):
        begin, end = np.asarray(row).reshape(-1, 2).T
        inside = np.zeros(len(begin), dtype=bool)
        for first, last in answers:
            inside |= (begin < last) & (end > first)
        rows.append(inside.astype(int).tolist())
    return rows
