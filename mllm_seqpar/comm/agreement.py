"""Rank agreement: raise on all ranks of a group before any of them can hang.

A rank with a different option, different data, or a file that only it cannot read may exit or wait while the others are
in a collective that it never joins. `agree` gathers from every rank whether a step failed, and a fingerprint of its
facts. If any rank failed or the fingerprints differ, the ranks exchange details for the message, and every rank raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from mllm_seqpar.digests import fingerprint
from mllm_seqpar.errors import AgreementError, SeqParError

from .base import Communicator

T = TypeVar("T")

_NUMBERS = 4
"""The numbers of a rank in the exchange in addition to the fingerprints. Every call has the same number, so that ranks
in different calls complete the exchange and can name their calls."""


def attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (the result of `step`, None), or (None, what it raised); the caller raises it once all ranks know."""
    try:
        return step(), None
    except Exception as error:  # noqa: BLE001 - raised by the caller, after a collective
        return None, error


def _nothing(*_: Any) -> Any:
    return None


@overload
def agree(
    comm: Communicator,
    what: str,
    step: Callable[[], T] = ...,
    facts: Callable[[T], Mapping[str, Any] | None] = ...,
    *,
    error: Exception | None = ...,
    remedy: str = ...,
) -> T: ...
@overload
def agree(
    comm: Communicator,
    what: str,
    step: Callable[[], T] = ...,
    facts: Callable[[T], Mapping[str, Any] | None] = ...,
    *,
    error: Exception | None = ...,
    numbers: Callable[[T], Sequence[int]],
    remedy: str = ...,
) -> tuple[T, list[list[int]]]: ...
def agree(
    comm: Communicator,
    what: str,
    step: Callable[[], T] = _nothing,
    facts: Callable[[T], Mapping[str, Any] | None] = _nothing,
    *,
    error: Exception | None = None,
    numbers: Callable[[T], Sequence[int]] | None = None,
    remedy: str = "Pass the same on every rank",
) -> T | tuple[T, list[list[int]]]:
    """Return this rank's ``step()`` if it succeeded on every rank of the group and all ranks found the same facts.

    Args:
        comm: the group; every rank calls this.
        what: the subject of messages ("forward pass").
        step: the step. It must not communicate, unless it then fails on all ranks (as `patch_model` does).
        facts: maps the result to the values that must be equal on all ranks, by name; compared as text.
        error: an error that has already occurred on this rank, instead of `step`.
        numbers: maps the result to at most 4 integers in which the ranks may differ.
        remedy: what to do if the facts differ.

    Returns:
        The result of `step`; with `numbers`, also those of every rank.

    Raises:
        AgreementError: the step failed on another rank, whose message is quoted, the facts differ, or the ranks make
            different calls.
        Exception: what `step` raised on this rank.
    """
    result: Any = None
    described: Mapping[str, Any] = {}
    sent: list[int] = []
    try:
        if error is not None:
            raise error
        result = step()
        if comm.size > 1:
            described = {name: str(x) for name, x in (facts(result) or {}).items()}
        if numbers is not None:
            sent = list(map(int, numbers(result)))
    except Exception as failure:  # noqa: BLE001 - raised below, after the exchange
        if comm.size == 1:
            raise
        error = failure
    if comm.size == 1:
        return result if numbers is None else (result, [sent])
    hashes = fingerprint(what), int(error is not None), fingerprint(json.dumps(described, sort_keys=True))
    rows = comm.gather_ints([*hashes, *sent, *[0] * (_NUMBERS - len(sent))])
    if any([row[:3] != rows[0][:3] or row[1] for row in rows]):
        _raise_difference(comm, what, error, described, remedy)
    return result if numbers is None else (result, [row[3 : 3 + len(sent)] for row in rows])


def _raise_difference(
    comm: Communicator, what: str, error: Exception | None, facts: Mapping[str, str], remedy: str
) -> None:
    """Exchange the details of a disagreement, and raise on every rank."""
    rows = [json.loads(text) for text in comm.gather_texts(json.dumps([what, _message(error), facts]))]
    calls, messages = [row[0] for row in rows], [row[1] for row in rows]
    if len(set(calls)) > 1:
        raise AgreementError(
            f"the ranks of the group are in different calls at the same time: {by_rank(calls)}. Every rank of the "
            "group must make the same calls in the same order, including those whose result it does not use"
        )
    if error is not None:
        # Rank 0 quotes all failures if it did not fail itself; otherwise its error represents identical ones of other
        # ranks.
        if isinstance(error, SeqParError) and messages[0] in (None, messages[comm.rank]):
            error.__dict__[_RANK_0_REPORTS] = True
        raise error
    if any(messages):
        raise AgreementError(f"{what}: {by_rank(messages)}")
    names = list(dict.fromkeys(name for row in rows for name in row[2]))
    values = {name: [row[2].get(name) for row in rows] for name in names}
    differing = " | ".join(f"{name}: {by_rank(each)}" for name, each in values.items() if len(set(each)) > 1)
    raise AgreementError(f"{what}: the ranks differ in {differing}. {remedy}")


_RANK_0_REPORTS = "_rank_0_reports"


def is_reported_by_rank_0(error: SeqParError) -> bool:
    """Return True if the error that `agree` raised on rank 0 also reports this one."""
    return bool(error.__dict__.get(_RANK_0_REPORTS))


def _message(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, SeqParError) else f"{type(error).__name__}: {error}"


def by_rank(values: Sequence[str | None]) -> str:
    """Return each distinct value with the ranks that have it; messages of None are left out."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    shown = [(value, ranks) for value, ranks in groups.items() if value]
    names = (("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks)) for _, ranks in shown)
    return "; ".join(f"{name}: {value}" for name, (value, _) in zip(names, shown, strict=True))
