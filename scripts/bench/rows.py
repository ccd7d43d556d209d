"""Benchmark results as CSV files: one line per measurement, column names in the first line."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def append(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a CSV file. Rows may add columns to the file and may lack some of its columns."""
    everything = [*read(path), *rows]
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in everything for name in row), restval="")
        writer.writeheader()
        writer.writerows(everything)


def read(path: str | Path) -> list[dict[str, str]]:
    """Return all rows as text, each without its empty columns; an empty list if the file does not exist."""
    path = Path(path)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value != ""} for row in csv.DictReader(file)]


def digits(row: Mapping[str, Any], count: int = 5) -> dict[str, Any]:
    return {name: float(f"{x:.{count}g}") if isinstance(x, float) else x for name, x in row.items()}


def as_text(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return new rows as `read` returns those of a file."""
    return [{name: str(value) for name, value in row.items() if value != ""} for row in rows]


def groups(rows: Sequence[dict[str, str]], *columns: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(" ".join(row.get(name, "") for name in columns), []).append(row)
    return found
