"""Finding out, before anything can hang, that ranks of a group were given different things.

Every rank contributes a few numbers; all compare all. Disagreement, or a failure on one rank while it worked out its
numbers, raises on EVERY rank, with what each of them found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import AgreementError


def fingerprint(text: str) -> int:
    """A number that two ranks share when (and, but for chance, only when) their texts are the same; 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def require_agreement(
    comm: Communicator, what: str, names: tuple[str, ...], describe: Callable[[], Mapping[str, int]]
) -> None:
    """Raises on every rank unless `describe` gives the same integers on all ranks of the group.

    Args:
        comm: the group; with one rank, `describe` is only called (for its own checks).
        what: the subject, for the message ("forward pass").
        names: the keys of what `describe` returns.
        describe: this rank's numbers; what it raises is raised here, and makes the other ranks raise too.

    Raises:
        AgreementError: the ranks differ, or another rank's `describe` raised.
    """
    error: Exception | None = None
    values: Mapping[str, int] = {}
    try:
        values = describe()
    except Exception as caught:  # noqa: BLE001 - raised again below, after the others have been told
        error = caught
    everyone = comm.gather_ints([int(error is not None), *(int(values.get(name, 0)) for name in names)])
    _raise_failures(comm, what, [row[0] for row in everyone], error)
    differing = [i for i in range(len(names)) if len({row[i + 1] for row in everyone}) > 1]
    if differing:
        found = "; ".join(
            f"{names[i]}: " + ", ".join(f"rank {rank} has {row[i + 1]}" for rank, row in enumerate(everyone))
            for i in differing
        )
        raise AgreementError(
            f"{what}: the ranks of the sequence-parallel group were given different inputs. {found}. "
            "Every rank of the group must pass what it would pass to the unpatched model"
        )


def require_same_text(comm: Communicator, what: str, describe: Callable[[], str]) -> None:
    """Raises on every rank, quoting all ranks, unless `describe` gives the same text on all (a configuration, say).

    What `describe` raises is raised here, and makes the other ranks raise too.

    Raises:
        AgreementError: the ranks differ, or another rank's `describe` raised.
    """
    error: Exception | None = None
    text = ""
    try:
        text = describe()
    except Exception as caught:  # noqa: BLE001 - raised again below, after the others have been told
        error = caught
    facts = comm.gather_ints([int(error is not None), fingerprint(text)])
    _raise_failures(comm, what, [row[0] for row in facts], error)
    if all(row == facts[0] for row in facts):
        return
    quoted = "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(comm.gather_texts(text)))
    raise AgreementError(f"{what}: the ranks of the group disagree. {quoted}. Pass the same on every rank")


def _raise_failures(comm: Communicator, what: str, failed: Sequence[int], error: Exception | None) -> None:
    """Raises this rank's own error, or, when others failed, one that names them."""
    if error is not None:
        raise error
    ranks = [rank for rank, value in enumerate(failed) if value]
    if ranks:
        raise AgreementError(
            f"{what}: rank {', '.join(map(str, ranks))} of the group failed while checking its arguments; its own "
            f"message says why. This is rank {comm.rank}, whose arguments are in order"
        )
