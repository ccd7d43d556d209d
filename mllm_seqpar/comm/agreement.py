"""Rank agreement: raise on all ranks of a group before any of them can hang.

A rank with a different option, different data, or a file that only it cannot read may exit, or wait, while the others
are in a collective that it never joins. The functions here gather from every rank whether a step failed and what it
found. Every rank then raises if any rank failed or the ranks differ. `require_agreement` and `require_same_text` serve
the forward pass and `patch_model`; `check_collectively` serves the steps of a program.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mllm_seqpar.errors import AgreementError, SeqParError

from .base import Communicator

T = TypeVar("T")

_NUMBERS = 32
"""Integers of a rank in the first exchange of an agreement: as many in every kind of call, so that ranks in different
calls complete it and can name their calls."""


def fingerprint(text: str) -> int:
    """Return 63 bits of a hash of `text`, to compare texts across ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (the result of `step`, None), or (None, what it raised); the caller raises it once all ranks know."""
    try:
        return step(), None
    except Exception as error:  # noqa: BLE001 - raised by the caller, after a collective
        return None, error


def require_agreement(
    comm: Communicator,
    what: str,
    names: tuple[str, ...],
    describe: Callable[[], Mapping[str, int]],
    reported: tuple[str, ...] = (),
) -> list[list[int]]:
    """Raise on every rank unless `describe` returns the same integers on all ranks of the group.

    Args:
        comm: the group; with one rank, `describe` is only called (for its own checks).
        what: the subject of messages ("forward pass").
        names: the keys of the mapping that `describe` returns.
        describe: returns this rank's numbers; what it raises is raised here, and makes the other ranks raise too.
        reported: further keys of that mapping, in which the ranks may differ.

    Returns:
        The numbers of the keys `reported`, for each rank.

    Raises:
        AgreementError: the ranks differ, or `describe` raised on another rank.
    """
    values, error = attempt(describe)
    numbers = (int((values or {}).get(name, 0)) for name in (*names, *reported))
    rows = _begin(comm, what, [int(error is not None), *numbers])
    _raise_failures(comm, what, [row[0] for row in rows], error)
    differing = [i for i in range(len(names)) if len({row[i + 1] for row in rows}) > 1]
    if differing:
        found = "; ".join(
            f"{names[i]}: " + ", ".join(f"rank {rank} has {row[i + 1]}" for rank, row in enumerate(rows))
            for i in differing
        )
        raise AgreementError(
            f"{what}: the ranks of the sequence-parallel group were given different inputs. {found}. "
            "Every rank of the group must pass what it would pass to the unpatched model. transformers' Trainer gives "
            "each rank samples of its own: use mllm_seqpar.SeqParTrainer instead, or SeqParMixin for a subclass"
        )
    return [row[1 + len(names) :] for row in rows]


def require_same_text(comm: Communicator, what: str, describe: Callable[[], str]) -> None:
    """Raise on every rank, quoting all ranks, unless `describe` returns the same text (a configuration, say) on all.

    What `describe` raises is raised here, and makes the other ranks raise too.

    Raises:
        AgreementError: the ranks differ, or `describe` raised on another rank.
    """
    result, error = attempt(describe)
    text = result or ""
    rows = _begin(comm, what, [int(error is not None), fingerprint(text)])
    _raise_failures(comm, what, [row[0] for row in rows], error)
    if all(row == rows[0] for row in rows):
        return
    quoted = "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(comm.gather_texts(text)))
    raise AgreementError(f"{what}: the ranks of the group disagree. {quoted}. Pass the same on every rank")


def _begin(comm: Communicator, what: str, numbers: Sequence[int]) -> list[list[int]]:
    """Gather the numbers of all ranks, in the exchange that begins every agreement of whatever kind.

    Raises:
        AgreementError: on every rank if the ranks make different calls, such as a forward pass and `generate`.
    """
    if len(numbers) >= _NUMBERS:
        raise RuntimeError(f"{what}: {len(numbers)} numbers to compare; raise _NUMBERS, which is {_NUMBERS}")
    rows = comm.gather_ints([fingerprint(what), *numbers, *[0] * (_NUMBERS - 1 - len(numbers))])
    if len({row[0] for row in rows}) > 1:
        calls = "; ".join(f"{_ranks(ranks)}: {call}" for call, ranks in _by_value(comm.gather_texts(what)))
        raise AgreementError(
            f"the ranks of the group are in different calls at the same time: {calls}. Every rank of the group must "
            "make the same calls in the same order, also those whose result it does not use"
        )
    return [row[1 : 1 + len(numbers)] for row in rows]


def _raise_failures(comm: Communicator, what: str, failed: Sequence[int], error: Exception | None) -> None:
    """Raise this rank's own error, or one that names the ranks that failed."""
    if error is not None:
        raise error
    ranks = [rank for rank, value in enumerate(failed) if value]
    if ranks:
        raise AgreementError(
            f"{what}: rank {', '.join(map(str, ranks))} of the group failed while checking its arguments; its own "
            f"message says why. This is rank {comm.rank}, whose arguments are in order"
        )


def check_collectively(
    comm: Communicator,
    what: str,
    step: Callable[[], T],
    facts: Callable[[T], Mapping[str, Any]] = lambda result: {},
) -> T:
    """Return this rank's ``step()`` if it succeeded on every rank of the group and all ranks found the same facts.

    Args:
        comm: the group; every rank calls this.
        what: the subject of messages.
        step: the step. It must not communicate, unless it then fails on all ranks (as `patch_model` does).
        facts: maps the result to what all ranks must have in common, by name; compared as text.

    Raises:
        AgreementError: the step failed on another rank, whose message is quoted, or the facts differ.
        Exception: what `step` raised on this rank.
    """
    result, error = attempt(lambda: (value := step(), facts(value)))
    raise_on_all_ranks(comm, what, error, result[1] if result else {})
    assert result is not None  # or `raise_on_all_ranks` has raised
    return result[0]


def raise_on_all_ranks(
    comm: Communicator, what: str, error: Exception | None, facts: Mapping[str, Any] | None = None
) -> None:
    """Raise on every rank if any rank has an `error` or the ranks have different `facts`."""
    mine = [_message(error), {name: str(value) for name, value in (facts or {}).items()}]
    _begin(comm, what, [])
    rows = [json.loads(text) for text in comm.gather_texts(json.dumps(mine))]
    messages = [row[0] for row in rows]
    if error is not None:
        # Rank 0 quotes all failures if it did not fail itself; else its own error stands for all that are equal to it.
        if isinstance(error, SeqParError) and messages[0] in (None, messages[comm.rank]):
            error.__dict__[_RANK_0_REPORTS] = True
        raise error
    if any(messages):
        failed = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in _by_value(messages) if text)
        raise AgreementError(f"{what}: {failed}")
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    by_name = {name: _by_value([values.get(name) for _, values in rows]) for name in names}
    differing = " | ".join(
        f"{name}: " + "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in groups)
        for name, groups in by_name.items()
        if len(groups) > 1
    )
    if differing:
        raise AgreementError(
            f"{what}: the ranks differ in {differing}. Start all ranks with the same options and files"
        )


_RANK_0_REPORTS = "_rank_0_reports"


def is_reported_by_rank_0(error: SeqParError) -> bool:
    """Return True if what `raise_on_all_ranks` raised on rank 0 also reports this error."""
    return bool(error.__dict__.get(_RANK_0_REPORTS))


def _message(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, SeqParError) else f"{type(error).__name__}: {error}"


def _by_value(values: Sequence[str | None]) -> list[tuple[str | None, list[int]]]:
    """Return each distinct value with the ranks that have it."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
