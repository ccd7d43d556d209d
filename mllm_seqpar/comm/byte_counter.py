"""Bytes and messages that one rank has sent, by label. Counting happens where the transfer is posted, nowhere else."""

from __future__ import annotations

from collections import Counter


class ByteCounter:
    """What one rank sent: ``sent[label]`` in bytes and ``messages[label]``, since creation or the last ``reset``.

    A collective counts what a ring of one-hop sends would: an all-gather of x bytes among n ranks is ``(n - 1) * x``.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def add(self, label: str, nbytes: int, messages: int = 1) -> None:
        """Records `nbytes` bytes sent in `messages` messages under `label`."""
        self.sent[label] += nbytes
        self.messages[label] += messages

    @property
    def total(self) -> int:
        """Bytes sent under all labels."""
        return sum(self.sent.values())

    def reset(self) -> None:
        """Forgets everything counted so far."""
        self.sent.clear()
        self.messages.clear()

    def __repr__(self) -> str:
        return f"ByteCounter(total={self.total}, sent={dict(self.sent)})"
