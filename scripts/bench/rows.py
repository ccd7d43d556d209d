"""Rows of all benchmarks: CSV, one line per measurement, names of columns in the first line."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def append(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds rows to a CSV file; a row may have columns that the file has not yet, and lack some that it has."""
    path = Path(path)
    found = read(path) if path.exists() else []
    columns = list(dict.fromkeys(name for row in [*found, *rows] for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows([*found, *rows])


def read(path: str | Path) -> list[dict[str, str]]:
    """All rows, as text; what a row does not have is left out of it."""
    with Path(path).open(newline="") as file:
        return [{name: value for name, value in row.items() if value != ""} for row in csv.DictReader(file)]


def digits(row: Mapping[str, Any], count: int = 5) -> dict[str, Any]:
    """The same with floats rounded to `count` significant digits."""
    return {name: float(f"{x:.{count}g}") if isinstance(x, float) else x for name, x in row.items()}
