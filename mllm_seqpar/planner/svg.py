"""What pictures are made of: a few shapes of SVG as strings. Every picture has a background of its own."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

DARK, GREY = "#222222", "#666666"


def text(
    x: float, y: float, content: str, *, bold: bool = False, size: int = 0, fill: str = DARK, anchor: str = "start"
) -> str:
    """Text whose baseline begins at (x, y), or has its middle or end there; a size of 0 is the picture's own."""
    more = ' font-weight="bold"' if bold else ""
    more += f' font-size="{size}"' if size else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{more}>{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, *, fill: str, more: str = "", tip: str = "") -> str:
    """A rectangle; `more` are further attributes, `tip` shows where a pointer rests on it."""
    shape = f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{fill}"'
    shape += f" {more}" if more else ""
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str = GREY, more: str = "") -> str:
    """A line."""
    more = f" {more}" if more else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{more}/>'


def document(width: float, height: float, body: Iterable[str], *, size: int = 11) -> str:
    """A picture on white, so that it can be read on a dark page too; `size` is that of its text."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="{size}">'
    )
    return "\n".join([head, rect(0, 0, width, height, fill="white"), *body, "</svg>"]) + "\n"
