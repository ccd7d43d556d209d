"""Figures of benchmarks: horizontal bars with their values, labelled axes, and one legend below all panels.

Without matplotlib nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLUE, ORANGE, RED, GREY = "#2b6cb0", "#dd8a2f", "#c0392b", "#9aa0a6"
TICKS = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Series:
    """Bars of one kind: the name in the legend, the colour, and a length by the name of the line; None: no bar."""

    name: str
    color: str
    lengths: Mapping[str, float]


def grouped_bars(
    path: Path,
    panels: Mapping[str, Sequence[Series]],
    *,
    title: str,
    x_label: str,
    y_label: str = "",
    columns: int = 2,
    form: str = ".2f",
    marks: Mapping[str, Mapping[str, float]] | None = None,
    mark_name: str = "",
    log_from: float | None = None,
) -> None:
    """Draw groups of bars: per panel title the series, whose lines have the same names.

    Args:
        form: the format of the value that is written beside each bar.
        marks: per panel and line, a value that is marked; `mark_name` is its name in the legend.
        log_from: where a logarithmic scale begins; None for a linear scale from 0.
    """
    lines = max((sum(len(s.lengths) for s in series) for series in panels.values()), default=0)
    with _figure(path, panels, columns, 0.9 + 0.21 * lines, title) as axes:
        for axis, (name, series) in zip(axes, panels.items(), strict=False):
            names = list(dict.fromkeys(line for s in series for line in s.lengths))
            thickness = 0.8 / len(series)
            for number, bars in enumerate(series):
                for place, line in enumerate(names):
                    if line not in bars.lengths:
                        continue
                    y, length = place + (number + 0.5) * thickness - 0.4, bars.lengths[line]
                    axis.barh(y, length, 0.92 * thickness, color=bars.color, label=bars.name)
                    mark = (marks or {}).get(name, {}).get(line)
                    if mark is not None:
                        axis.plot([mark], [y], "k|", markersize=8, markeredgewidth=1.5, label=mark_name)
                    axis.text(max(length, mark or 0), y, f"  {length:{form}}", va="center", fontsize=8)
            axis.set_yticks(range(len(names)), names)
            axis.set_ylim(len(names) - 0.5, -0.5)
            _describe(axis, name, x_label, y_label)
            longest = max(max(s.lengths.values()) for s in series)
            if log_from is None:
                axis.set_xlim(0, 1.18 * longest)
            else:
                axis.set_xscale("log")
                axis.set_xticks(TICKS, map(str, TICKS))
                axis.minorticks_off()
                axis.set_xlim(log_from, 1.45 * longest)


def _describe(axis: Any, name: str, x_label: str, y_label: str) -> None:
    axis.set_title(name, fontsize=10, loc="left")
    axis.set_xlabel(x_label, fontsize=9)
    axis.set_ylabel(y_label, fontsize=9)


@contextmanager
def _figure(path: Path, panels: Mapping[str, Any], columns: int, height: float, title: str) -> Iterator[list[Any]]:
    """Yield the axes of a new figure, add the legend and save it; yield no axes without panels or matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        yield []
        return
    if not panels:
        yield []
        return
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    drawn = Figure(figsize=(9, height * rows + 0.8), layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(title, fontsize=11, fontweight="bold")
    grid = drawn.subplots(rows, columns, squeeze=False)
    for axis in grid.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8.5)
    for axis in grid.flat[len(panels) :]:
        axis.set_axis_off()
    yield list(grid.flat)
    found = {
        label: handle for axis in grid.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    found = dict(sorted(found.items(), key=lambda item: not hasattr(item[1], "patches")))  # bars before marks
    drawn.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=min(4, len(found)), fontsize=9, frameon=False
    )
    drawn.savefig(path, dpi=130, metadata={"Software": None})
