"""Whether all ranks were started with the same thing, asked before anything can hang.

A rank with another option, other data or a file that only it cannot read would stop in the first collective that the
others do not join, and they would wait for the time limit. Here each rank tells what it has, or what stopped it, and
every rank raises the same message.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mllm_seqpar.errors import AgreementError, SeqParError
from mllm_seqpar.training.failure import mark_same_everywhere


def require_agreement(what: str, facts: Mapping[str, Any], problem: SeqParError | None = None) -> None:
    """Raises on every rank unless no rank has a `problem` and all have equal `facts`. One collective on the world.

    Args:
        what: the subject, for the message.
        facts: name -> value; values are compared as text.
        problem: what stopped this rank from getting as far as the others, or None.

    Raises:
        AgreementError: some ranks differ; the message names what differs and each rank's value.
        SeqParError: the problem, when all ranks have the same one; otherwise an AgreementError naming the ranks.
    """
    mine = (type(problem), str(problem)) if problem else None
    rows: list[Any] = [(mine, {name: str(value) for name, value in facts.items()})]
    if dist.is_initialized():
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, (mine, {name: str(value) for name, value in facts.items()}))
    problems = [row[0] for row in rows]
    if problem and all(other == mine for other in problems):
        raise mark_same_everywhere(problem)
    if any(problems):
        text = "; ".join(f"{_ranks(who)}: {told}" for told, who in _by_value(p and p[1] for p in problems) if told)
        raise AgreementError(f"{what}: {text}")
    names = sorted({name for _, values in rows for name in values})
    differing = [name for name in names if len({values.get(name) for _, values in rows}) > 1]
    if differing:
        lines = [
            f"{name}: " + "; ".join(f"{_ranks(who)}: {value}" for value, who in _by_value(v.get(name) for _, v in rows))
            for name in differing
        ]
        raise AgreementError(
            f"{what}: the ranks differ in " + " | ".join(lines) + ". Start all ranks with the same options and files"
        )


def _by_value(values: Iterable[Any]) -> list[tuple[Any, list[int]]]:
    """Each distinct value with the ranks that have it."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def file_digest(path: str | Path) -> str:
    """A short digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def text_digest(parts: Iterable[Any]) -> str:
    """A short digest of the `repr` of each part."""
    made = hashlib.sha256()
    for part in parts:
        made.update(repr(part).encode() + b"\0")
    return made.hexdigest()[:16]
