"""Steps that can fail on one rank only: all ranks learn of it, and stop, before the next thing they do together.

A rank that cannot read its part of a video would otherwise leave, or wait, while the others stand in a collective that
it never joins. Here every rank tells after such a step what stopped it, if anything, and what it found; all compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..comm import Communicator
from ..errors import AgreementError, SeqParError
from ..training.failure import mark_same_everywhere

Made = TypeVar("Made")


def together(
    comm: Communicator,
    what: str,
    work: Callable[[], Made],
    facts: Callable[[Made], Mapping[str, Any]] = lambda made: {},
) -> Made:
    """This rank's ``work()``, provided that it went well on every rank of the group and that all found the same facts.

    Args:
        comm: the group; every rank calls this.
        what: the subject, for messages.
        work: the step. It must not communicate.
        facts: from the result, name -> what all ranks must have in common; compared as text.

    Raises:
        AgreementError: another rank failed, and the message says with what, or the facts differ.
        Exception: what `work` raised here.
    """
    error: Exception | None = None
    found: dict[str, str] = {}
    try:
        made = work()
        found = {name: str(value) for name, value in facts(made).items()}
    except Exception as caught:  # noqa: BLE001 - raised below, when the other ranks know
        error = caught
    settle(comm, what, error, found)
    return made


def settle(comm: Communicator, what: str, error: Exception | None, facts: Mapping[str, str] | None = None) -> None:
    """The second half of `together`: raises on every rank unless no rank has an `error` and all have equal `facts`."""
    rows = [json.loads(text) for text in gather_texts(comm, json.dumps([_told(error), dict(facts or {})]))]
    told = [row[0] for row in rows]
    if error is not None:
        raise mark_same_everywhere(error) if isinstance(error, SeqParError) else error
    if any(told):
        failed = "; ".join(f"{_ranks(who)}: {text}" for text, who in _by_value(told) if text)
        raise AgreementError(f"{what}: {failed}")
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    differing = {
        name: by_rank for name in names if len(by_rank := _by_value([values.get(name) for _, values in rows])) > 1
    }
    if differing:
        listed = " | ".join(
            f"{name}: " + "; ".join(f"{_ranks(who)}: {value}" for value, who in by_rank)
            for name, by_rank in differing.items()
        )
        raise AgreementError(f"{what}: the ranks differ in {listed}. Start all ranks with the same options and files")


def gather_texts(comm: Communicator, text: str) -> list[str]:
    """The text of every rank of the group, by rank."""
    raw = text.encode()
    lengths = [row[0] for row in comm.gather_ints([len(raw)])]
    rows = comm.gather_ints([*raw, *[0] * (max(lengths) - len(raw))])
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def _told(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, SeqParError) else f"{type(error).__name__}: {error}"


def _by_value(values: Sequence[str | None]) -> list[tuple[str | None, list[int]]]:
    """Each distinct value with the ranks that have it."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
