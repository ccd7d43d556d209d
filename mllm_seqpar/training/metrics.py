"""Metrics as JSON lines, written by rank 0 and truncated to the resumed step."""

import json
import os
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import DataError


class MetricsFile:
    """Appends rows to a file. Every row has a "step" and is on disk when `write` returns.

    Floats are written with Python's `repr`, which reads back to the same bits.

    Args:
        path: the file; None on ranks other than 0, where nothing is written.
        keep: the step after which the run resumes; rows of later steps are removed.
    """

    def __init__(self, path: Path | None, keep: int) -> None:
        self._path = path
        if path is None:
            return
        rows = [row for row in read_metrics(path) if row["step"] <= keep] if path.exists() else []
        draft = path.with_name(path.name + ".tmp")
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(draft, path)

    def write(self, row: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, without a last line that a crash left incomplete.

    Raises:
        DataError: if another line is not a JSON object with a step.
    """
    lines = Path(path).read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise DataError(f"{path}, line {number} is not JSON: {error}; move the file away to start again") from error
        if not isinstance(row, dict) or "step" not in row:
            raise DataError(f"{path}, line {number} has no step; is it a metrics file?")
        rows.append(row)
    return rows
