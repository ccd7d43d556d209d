"""Rows of the table of `gpu_check.py`, and the file through which a child process returns them to its parent."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One check; `ok` is None if there is no limit."""

    check: str
    subject: str
    found: str
    allowed: str = ""
    ok: bool | None = None


def write(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    """Return the rows of a file, none if it does not exist. A line cut short by a crash is skipped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(Row(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return rows


def table(rows: list[Row]) -> str:
    verdict = {True: "ok", False: "FAILED", None: "-"}
    lines = [("check", "on", "found", "allowed", "")]
    lines += [(row.check, row.subject, row.found, row.allowed, verdict[row.ok]) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join("  ".join([*map(str.ljust, line, widths), line[4]]) for line in lines)
