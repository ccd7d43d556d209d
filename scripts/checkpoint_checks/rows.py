"""Rows of the report on a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """The result of one check.

    Attributes:
        check: its name.
        ok: whether it passed; None if it could not run.
        found: what was found, several lines at most.
    """

    check: str
    ok: bool | None
    found: str

    @property
    def verdict(self) -> str:
        """Return one word for `ok`."""
        return {True: "passed", False: "FAILED", None: "not run"}[self.ok]


def report(directory: Path, environment: str, rows: Sequence[Row]) -> str:
    """Return the report in Markdown."""
    lines = [f"## Check of the checkpoint {directory.resolve().name}", "", environment, ""]
    for row in rows:
        first, *more = row.found.splitlines() or [""]
        lines += [f"- **{row.check}: {row.verdict}.** {first}", *(f"  - {line}" for line in more)]
    return "\n".join(lines)
