"""A timeline as a picture: rank by time, above what a rank computes and waits for, below what it sends. Plain SVG.

What happens around a schedule (Ulysses' all-to-all, gathering of features, projections) is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .svg import document, line, rect, text
from .timeline import Timeline, TimelineSpan

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
        body.append(text(LEFT, y - 6, f"{name}: {duration(timeline.seconds)}", bold=True))
        for rank in range(min(timeline.ranks, MOST_RANKS)):
            body += _rank(rank, timeline.spans[rank % timeline.period], y, scale)
            y += 2 * LANE + GAP
        if timeline.ranks > MOST_RANKS:
            body.append(text(LEFT, y + 6, f"and {timeline.ranks - MOST_RANKS} more ranks"))
            y += 14
        body += _axis(y, longest, scale)
        y += 58
    return document(WIDTH, y, [text(LEFT, 18, title, bold=True), *_legend(), *body])


def _rank(rank: int, spans: Sequence[TimelineSpan], y: float, scale: float) -> list[str]:
    drawn = [text(6, y + LANE, f"rank {rank}")]
    for span in spans:
        lane = y + (LANE if span.kind == "transfer" else 0)
        width = max((span.end - span.start) * scale, 0.3)
        tip = f"{NAMES[span.kind]} {span.label}, step {span.step}, {duration(span.end - span.start)}"
        x, edge = LEFT + span.start * scale, 'stroke="white" stroke-width="0.4"'
        drawn.append(rect(x, lane, width, LANE - 1, fill=COLORS[span.kind], more=edge, tip=tip))
    return drawn


def _axis(y: float, longest: float, scale: float) -> list[str]:
    drawn = [line(LEFT, y, LEFT + longest * scale, y)]
    for tick in range(6):
        x = LEFT + longest * scale * tick / 5
        drawn.append(line(x, y, x, y + 4))
        drawn.append(text(x - 12, y + 16, duration(longest * tick / 5)))
    return drawn


def _legend() -> list[str]:
    drawn = []
    for i, (kind, color) in enumerate(COLORS.items()):
        x = LEFT + 140 * i
        drawn.append(rect(x, 28, 12, 10, fill=color))
        drawn.append(text(x + 17, 37, NAMES[kind]))
    return drawn


def duration(seconds: float) -> str:
    """As people read it: seconds, milliseconds or microseconds."""
    if seconds == 0:
        return "0"
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} us"
    )
