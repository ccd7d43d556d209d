"""The drawing of a schedule: rank by step. In a cell stands what is computed, below it what leaves meanwhile."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from mllm_seqpar.planner.svg import DARK, GREY, document, line, rect, text

COLORS = ("#f7b27a", "#9cc7ea", "#a8d59a", "#f6da74", "#cfaee6", "#8ed8cd", "#f4a3b5", "#cdc9a5")
"""Of ranks, all light: dark text can be read on each."""
LETTER, SIZE = 7.4, 13
CHIP, MOVE, PAD, TOP, LINE = 26, 23, 8, 40, 20
NARROWEST = 560


def color(rank: int) -> str:
    """That of a rank."""
    return COLORS[rank % len(COLORS)]


@dataclass(frozen=True)
class Chip:
    """One block: what it is called, and how it looks.

    Attributes:
        left, right: the names of its rows and of its keys.
        rows, columns: the ranks that these are at home on, whose colours they have; none: on all.
        part, parts: only rows from part/parts to (part + 1)/parts are computed.
        own: rows and keys of the rank that computes it.
        hidden: a mask lets nothing of it be seen.
        note: stands beside the keys.
    """

    left: str
    right: str
    rows: Sequence[int]
    columns: Sequence[int]
    part: int = 0
    parts: int = 1
    own: bool = False
    hidden: bool = False
    note: str = ""

    @property
    def keys(self) -> str:
        """What stands in its right half."""
        return f"{self.right} {self.note}".strip()

    @property
    def halves(self) -> tuple[float, float]:
        """Widths in pixels."""
        left, right = (LETTER * max(len(name), 3) + 14 for name in (self.left, self.keys))
        return left, right

    @property
    def width(self) -> float:
        """In pixels."""
        return sum(self.halves)


@dataclass(frozen=True)
class Leaving:
    """What leaves a rank during a step: a piece that is at home on rank `owner`."""

    piece: str
    owner: int
    to: str

    @property
    def width(self) -> float:
        """In pixels."""
        return LETTER * (len(self.piece) + len(self.to) + 4) + 10


@dataclass(frozen=True)
class Cell:
    """What one rank does at one step."""

    chips: Sequence[Chip] = ()
    leaving: Sequence[Leaving] = ()


@dataclass(frozen=True)
class Panel:
    """One pass: steps by name, and a row of cells for each rank."""

    title: str
    steps: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


def draw(title: str, panels: Sequence[Panel], legend: Sequence[str]) -> str:
    """The picture: panels one above the other, then the legend's lines."""
    body = [text(PAD, 24, title, bold=True, size=16)]
    y, width = float(TOP), LETTER * len(title) * 1.25
    for panel in panels:
        drawn, right, y = _panel(panel, y)
        body += drawn
        width = max(width, right)
    width = max(width, NARROWEST)
    for words in legend:
        for row in textwrap.wrap(words, int(width / LETTER)):
            y += LINE
            body.append(text(PAD, y, row, fill=GREY))
    return document(width + 2 * PAD, y + 2 * PAD, body, size=SIZE)


def _panel(panel: Panel, y: float) -> tuple[list[str], float, float]:
    """(shapes, right edge, lower edge) of a panel whose upper edge is y."""
    drawn = [text(PAD, y + 16, panel.title, bold=True)] if panel.title else []
    y += 28 if panel.title else 6
    left = PAD + LETTER * max(len(name) for name, _ in panel.rows) + 12
    columns = list(zip(*(cells for _, cells in panel.rows), strict=True))
    widths = [max(_width(cell) for cell in cells) for cells in columns]
    widths = [max(w, LETTER * len(name)) + 2 * PAD for w, name in zip(widths, panel.steps, strict=True)]
    lefts = [left + sum(widths[:i]) for i in range(len(widths) + 1)]
    for x, width, name in zip(lefts, widths, panel.steps, strict=False):
        drawn.append(text(x + width / 2, y + 14, name, fill=GREY, anchor="middle"))
    y += 20
    computes = [any(cell.chips for cell in cells) for cells in columns]
    for name, cells in panel.rows:
        chips = max(len(cell.chips) for cell in cells)
        aside = max([len(cell.leaving) for cell, own in zip(cells, computes, strict=True) if not own], default=0)
        beneath = max([len(cell.leaving) for cell, own in zip(cells, computes, strict=True) if own], default=0)
        height = max(chips * CHIP + beneath * MOVE, aside * MOVE) + 3 * PAD
        drawn.append(text(PAD, y + PAD + 17, name, bold=True))
        for x, width, cell, own in zip(lefts, widths, cells, computes, strict=False):
            drawn.append(rect(x + 2, y + 2, width - 4, height - 4, fill="#f6f6f4", more='rx="5"'))
            for i, chip in enumerate(cell.chips):
                drawn += _chip(chip, x + (width - chip.width) / 2, y + PAD + i * CHIP)
            below = y + PAD + (chips * CHIP + 4 if own else 0)
            if cell.leaving and own:
                drawn.append(line(x + PAD, below - 3, x + width - PAD, below - 3, stroke="#c8c8c4"))
            for i, move in enumerate(cell.leaving):
                drawn += _leaving(move, x + (width - move.width) / 2, below + i * MOVE + 2)
        y += height
    return drawn, lefts[-1], y + PAD


def _width(cell: Cell) -> float:
    return max([chip.width for chip in cell.chips] + [move.width for move in cell.leaving], default=0)


def _chip(chip: Chip, x: float, y: float) -> list[str]:
    """Left half in the colours of the rows' ranks, right half in those of the keys'."""
    height, (left, right) = CHIP - 5, chip.halves
    drawn = []
    top, part = y + height * chip.part / chip.parts, height / chip.parts
    if not chip.hidden:
        for start, width, owners in ((x, left, chip.rows), (x + left, right, chip.columns)):
            stripe = width / max(len(owners), 1)
            drawn += [rect(start + i * stripe, top, stripe, part, fill=color(o)) for i, o in enumerate(owners)]
    edge = 'stroke="#222222" stroke-width="2"' if chip.own else 'stroke="#a8a8a4" stroke-width="1"'
    if chip.hidden:
        edge += ' stroke-dasharray="3 3"'
    drawn.append(rect(x, y, left + right, height, fill="none", more=edge))
    ink = "#767672" if chip.hidden else DARK
    drawn.append(text(x + left / 2, y + 15, chip.left, fill=ink, anchor="middle"))
    drawn.append(text(x + left + right / 2, y + 15, chip.keys, fill=ink, anchor="middle"))
    return drawn


def _leaving(move: Leaving, x: float, y: float) -> list[str]:
    """A pill in its owner's colour, and where it goes."""
    width = LETTER * len(move.piece) + 10
    return [
        rect(x, y, width, MOVE - 5, fill=color(move.owner), more='rx="9"'),
        text(x + width / 2, y + 13.5, move.piece, anchor="middle"),
        text(x + width + 5, y + 13.5, f"\N{RIGHTWARDS ARROW} {move.to}"),
    ]
