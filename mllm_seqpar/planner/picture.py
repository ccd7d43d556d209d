"""A timeline as a picture: rank by time, above what a rank computes and waits for, below what it sends. Plain SVG.

What happens around a schedule (Ulysses' all-to-all, gathering of features, projections) is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .simulate import Span, Timeline

COLORS = {"compute": "#4c78a8", "wait": "#e45756", "transfer": "#72b7b2"}
NAMES = {"compute": "computes a block", "wait": "waits", "transfer": "sends"}
MOST_RANKS = 16
WIDTH, LEFT, TOP, LANE, GAP = 1100, 70, 64, 13, 9


def svg(title: str, panels: Sequence[tuple[str, Timeline]]) -> str:
    """A picture of timelines one above the other on one scale of time.

    Args:
        title: stands above.
        panels: (name, timeline with spans) of each; of more than 16 ranks the first 16 are drawn.
    """
    longest = max(timeline.seconds for _, timeline in panels) or 1.0
    scale = (WIDTH - LEFT - 30) / longest
    body: list[str] = []
    y = TOP
    for name, timeline in panels:
        body.append(_text(LEFT, y - 6, f"{name}: {_time(timeline.seconds)}", bold=True))
        for rank in range(min(timeline.ranks, MOST_RANKS)):
            body += _rank(rank, timeline.spans[rank % timeline.period], y, scale)
            y += 2 * LANE + GAP
        if timeline.ranks > MOST_RANKS:
            body.append(_text(LEFT, y + 6, f"and {timeline.ranks - MOST_RANKS} more ranks"))
            y += 14
        body += _axis(y, longest, scale)
        y += 58
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{y}" fill="white"/>',
        _text(LEFT, 18, title, bold=True),
        *_legend(),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _rank(rank: int, spans: Sequence[Span], y: float, scale: float) -> list[str]:
    drawn = [_text(6, y + LANE, f"rank {rank}")]
    for span in spans:
        lane = y + (LANE if span.kind == "transfer" else 0)
        width = max((span.end - span.start) * scale, 0.3)
        tip = escape(f"{NAMES[span.kind]} {span.label}, step {span.step}, {_time(span.end - span.start)}")
        drawn.append(
            f'<rect x="{LEFT + span.start * scale:.2f}" y="{lane:.1f}" width="{width:.2f}" height="{LANE - 1}" '
            f'fill="{COLORS[span.kind]}" stroke="white" stroke-width="0.4"><title>{tip}</title></rect>'
        )
    return drawn


def _axis(y: float, longest: float, scale: float) -> list[str]:
    drawn = [f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + longest * scale:.1f}" y2="{y}" stroke="#666"/>']
    for tick in range(6):
        x = LEFT + longest * scale * tick / 5
        drawn.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}" stroke="#666"/>')
        drawn.append(_text(x - 12, y + 16, _time(longest * tick / 5)))
    return drawn


def _legend() -> list[str]:
    drawn = []
    for i, (kind, color) in enumerate(COLORS.items()):
        x = LEFT + 140 * i
        drawn.append(f'<rect x="{x}" y="28" width="12" height="10" fill="{color}"/>')
        drawn.append(_text(x + 17, 37, NAMES[kind]))
    return drawn


def _text(x: float, y: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{weight}>{escape(text)}</text>'


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} us"
    )
