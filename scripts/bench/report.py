"""From rows of benchmarks to a page: what the sections of `docs/benchmarks.md` have in common.

A section is a function from the folder of rows to markdown, None where its rows are missing. It may draw figures into
that folder (matplotlib; without it the page has tables only).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rows import read

Row = dict[str, str]
WHERE = ("hardware", "threads", "cuda", "torch", "transformers", "commit")


def rows_of(folder: Path, name: str) -> list[Row]:
    """The rows of one run, none where it was not made."""
    path = folder / f"{name}.csv"
    return read(path) if path.exists() else []


def measured_on(rows: Sequence[Row]) -> str:
    """Where rows come from, as a sentence."""
    found = [", ".join(f"{name} {row[name]}" for name in WHERE if name in row) for row in rows]
    return "Measured on " + "; and on ".join(dict.fromkeys(found)) + "."


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A markdown table; numbers are to the right."""
    body = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    right = [all(_is_number(row[i]) for row in body) for i in range(len(head))]
    lines = [head, ["---:" if is_right else "---" for is_right in right], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _is_number(cell: str) -> bool:
    return not cell or cell.removeprefix(">= ")[0] in "-+0123456789"


def groups(rows: Sequence[Row], *names: str) -> dict[str, list[Row]]:
    """Rows by the values of some columns, in the order in which they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(" ".join(row.get(name, "") for name in names), []).append(row)
    return found


@contextmanager
def figure(
    path: Path, width: float = 8.0, height: float = 3.6, columns: int = 1, rows: int = 1
) -> Iterator[list[Any] | None]:
    """The axes of a new figure, saved to `path` afterwards; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        yield None
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    try:
        yield list(axes.flat)
        drawn.savefig(path, dpi=110, metadata={"Software": None})
    finally:
        pyplot.close(drawn)


def shown(path: Path, alt: str) -> str:
    """Markdown that shows a figure of the folder of rows, which lies beside the page; nothing where there is none."""
    return f"\n![{alt}]({path.parent.name}/{path.name})\n" if path.exists() else ""
