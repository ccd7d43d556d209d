"""Steps that can fail on one rank only: all ranks learn of it, and stop, before the next thing they do together.

A rank with another option, other data, or a file that only it cannot read would otherwise leave, or wait, while the
others stand in a collective that it never joins. Here every rank tells after such a step what stopped it, if anything,
and what it found; all compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import AgreementError, SeqParError

Made = TypeVar("Made")


def check_collectively(
    comm: Communicator,
    what: str,
    work: Callable[[], Made],
    facts: Callable[[Made], Mapping[str, Any]] = lambda made: {},
) -> Made:
    """This rank's ``work()``, provided that it went well on every rank of the group and that all found the same facts.

    Args:
        comm: the group; every rank calls this.
        what: the subject, for messages.
        work: the step. It must not communicate, unless it then ends on all ranks (as `patch_model` does).
        facts: from the result, name -> what all ranks must have in common; compared as text.

    Raises:
        AgreementError: another rank failed, and the message says with what, or the facts differ.
        Exception: what `work` raised here.
    """
    made, error = attempt(lambda: (done := work(), facts(done)))
    raise_on_all_ranks(comm, what, error, made[1] if made else {})
    assert made is not None  # or `raise_on_all_ranks` has raised
    return made[0]


def attempt(work: Callable[[], Made]) -> tuple[Made | None, Exception | None]:
    """(result, None), or (None, the exception), for `raise_on_all_ranks`: the first half of `check_collectively`."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - raised by `raise_on_all_ranks`, when the other ranks know
        return None, error


def raise_on_all_ranks(
    comm: Communicator, what: str, error: Exception | None, facts: Mapping[str, Any] | None = None
) -> None:
    """Raise on every rank if any rank has an `error` or the ranks have different `facts`."""
    mine = [_told(error), {name: str(value) for name, value in (facts or {}).items()}]
    rows = [json.loads(text) for text in comm.gather_texts(json.dumps(mine))]
    told = [row[0] for row in rows]
    if error is not None:
        # Rank 0 quotes all that failed when it did not fail itself. Otherwise it speaks for those with the same error.
        if isinstance(error, SeqParError) and told[0] in (None, told[comm.rank]):
            error.__dict__[_RANK_0_REPORTS] = True
        raise error
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


_RANK_0_REPORTS = "_rank_0_reports"


def is_reported_by_rank_0(error: SeqParError) -> bool:
    """Return whether the error that `raise_on_all_ranks` raises on rank 0 covers this one."""
    return bool(error.__dict__.get(_RANK_0_REPORTS))


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
