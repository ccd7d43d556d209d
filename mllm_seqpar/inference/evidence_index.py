"""The index of the evidence pages of several videos: one HTML file that links to each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .evidence import Evidence
from .evidence_page import link, moment_data, write_page

_TEMPLATE = Path(__file__).parent / "page" / "index.html"


@dataclass(frozen=True)
class PageEntry:
    """A page and its entry in the index.

    Attributes:
        answers: question, answer, and the largest moment, if there is one, of each question.
    """

    name: str
    page: str
    answers: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, name: str, page: str, answers: Sequence[tuple[str, Evidence]], sources: Sequence[Any]) -> PageEntry:
        rows = []
        for question, evidence in answers:
            row: dict[str, Any] = {"question": question, "answer": "".join(evidence.pieces).strip()}
            if evidence.moments:
                row["moment"] = moment_data(evidence.moments[0], sources)
            rows.append(row)
        return cls(name, page, tuple(rows))


def write_evidence_index(path: str, entries: Sequence[PageEntry], faults: Sequence[str], model: str) -> None:
    """Write the index of pages, with the videos that could not be used.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    pages = [
        {"name": entry.name, "href": link(entry.page, target), "answers": list(entry.answers)} for entry in entries
    ]
    write_page(target, _TEMPLATE, {"model": model, "pages": pages, "faults": list(faults)})
