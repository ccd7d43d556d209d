"""Draw the figures of docs/figures with matplotlib.

    python scripts/docs/figures.py                                               # all figures
    python scripts/docs/figures.py --tile 4 2 --backward --output mesh.svg       # one mesh shape

An SVG file stores the data that it shows (`figure_data`) as JSON in its description. A test compares it with the
current data, independently of fonts and of the version of matplotlib.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import figure_data
from figure_data import Block, FigureData, Panel, Sent
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
COLORS = ("#f7b27a", "#9cc7ea", "#a8d59a", "#f6da74", "#cfaee6", "#8ed8cd", "#f4a3b5", "#cdc9a5")
"""Colours of the owner ranks, all light, so that dark text is readable on each."""
DARK, GREY = "#222222", "#666666"
FIGURES: dict[str, Callable[[], FigureData]] = {
    "lv-xattn": lambda: figure_data.mesh_figure("LV-XAttn, mesh shape (4, 1): Q shards move, KV shards stay", (4, 1)),
    "lv-xattn-mask": figure_data.frame_mask,
    "lv-xattn-frames": figure_data.frame_layouts,
    "ring": lambda: figure_data.mesh_figure("Ring Attention, mesh shape (1, 4): KV shards move, Q shards stay", (1, 4)),
    "ring-causal": figure_data.causal_layouts,
    "mesh": lambda: figure_data.mesh_figure(
        "Mesh-Attention, mesh shape (3, 2), if every transfer takes as long as a block", (3, 2)
    ),
    "ulysses": figure_data.ulysses,
    "replicate": figure_data.replicate,
    "decoding": figure_data.decoding,
    "star": figure_data.star,
}
# Sizes in points, which are the units of the axes.
CHARACTER, BLOCK, SENT, PADDING, LINE, NARROWEST = 7.4, 26, 23, 8, 20, 560
SVG = {"svg.fonttype": "none", "svg.hashsalt": "mllm-seqpar", "font.family": "sans-serif"}
"""Text stays text, and equal figures are equal files."""


def save(data: FigureData, path: Path) -> None:
    with rc_context(SVG):
        draw(data).savefig(path, format="svg", metadata={"Date": None, "Description": as_json(data)})


def as_json(data: FigureData) -> str:
    return json.dumps(asdict(data), separators=(",", ":"))


def draw(data: FigureData) -> Figure:
    layouts = [_widths(panel) for panel in data.panels]
    width = max(NARROWEST, CHARACTER * len(data.title) * 1.25, *(left + sum(steps) for left, steps in layouts))
    legend = [line for words in data.legend for line in textwrap.wrap(words, int(1.15 * width / CHARACTER))]
    heights = [_heights(panel) for panel in data.panels]
    panels = sum(
        (28 if p.title else 6) + 20 + sum(rows) + PADDING for p, rows in zip(data.panels, heights, strict=True)
    )
    size = width + 2 * PADDING, 40 + panels + LINE * len(legend) + 2 * PADDING
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axes.set_axis_off()
    _text(axes, PADDING, 19, data.title, ha="left", fontsize=16, fontweight="bold")
    y = 40.0
    for panel, (left, steps), rows in zip(data.panels, layouts, heights, strict=True):
        y = _draw_panel(axes, panel, y, left, steps, rows)
    for line in legend:
        y += LINE
        _text(axes, PADDING, y - 4, line, ha="left", color=GREY)
    return figure


def _has_blocks(panel: Panel) -> list[bool]:
    """Return for each step whether any rank computes a block; otherwise its cells show transfers alone."""
    return [any(cells[i].blocks for _, cells in panel.rows) for i in range(len(panel.steps))]


def _widths(panel: Panel) -> tuple[float, list[float]]:
    """Return the left edge of the first step, and the width of every step."""
    steps = []
    for name, cells in zip(panel.steps, zip(*(cells for _, cells in panel.rows), strict=True), strict=True):
        widths = [sum(_halves(b)) for cell in cells for b in cell.blocks]
        widths += [_sent_width(sent) for cell in cells for sent in cell.sent]
        steps.append(max(CHARACTER * len(name), *widths, 0) + 2 * PADDING)
    return PADDING + CHARACTER * max(len(name) for name, _ in panel.rows) + 12, steps


def _heights(panel: Panel) -> list[float]:
    heights = []
    for _, cells in panel.rows:
        blocks = max(len(cell.blocks) for cell in cells)
        columns = zip(cells, _has_blocks(panel), strict=True)
        heights.append(max(blocks * BLOCK * has + len(c.sent) * SENT for c, has in columns) + 3 * PADDING)
    return heights


def _draw_panel(axes: Axes, panel: Panel, y: float, left: float, widths: list[float], heights: list[float]) -> float:
    """Draw a panel whose upper edge is `y`; return its lower edge."""
    if panel.title:
        _text(axes, PADDING, y + 11, panel.title, ha="left", fontweight="bold")
    y += 28 if panel.title else 6
    lefts = [left + sum(widths[:i]) for i in range(len(widths))]
    for x, width, name in zip(lefts, widths, panel.steps, strict=True):
        _text(axes, x + width / 2, y + 9, name, color=GREY)
    y += 20
    for (name, cells), height in zip(panel.rows, heights, strict=True):
        _text(axes, PADDING, y + PADDING + 12, name, ha="left", fontweight="bold")
        blocks = max(len(cell.blocks) for cell in cells)
        for x, width, cell, has_blocks in zip(lefts, widths, cells, _has_blocks(panel), strict=True):
            _round(axes, x + 2, y + 2, width - 4, height - 4, 5, "#f6f6f4")
            for i, block in enumerate(cell.blocks):
                _draw_block(axes, block, x + (width - sum(_halves(block))) / 2, y + PADDING + i * BLOCK)
            below = y + PADDING + (blocks * BLOCK + 4 if has_blocks else 0)
            if cell.sent and has_blocks:
                axes.plot([x + PADDING, x + width - PADDING], [below - 3] * 2, color="#c8c8c4", linewidth=1)
            for i, sent in enumerate(cell.sent):
                _draw_sent(axes, sent, x + (width - _sent_width(sent)) / 2, below + i * SENT + 2)
        y += height
    return y + PADDING


def _halves(block: Block) -> tuple[float, float]:
    q, kv = (CHARACTER * max(len(label), 3) + 14 for label in (block.q, block.kv))
    return q, kv


def _draw_block(axes: Axes, block: Block, x: float, y: float) -> None:
    """Draw a block: the left half in the colours of the Q owners, the right half in those of the KV owners."""
    height, (q, kv) = BLOCK - 5, _halves(block)
    part = height / block.parts
    if not block.hidden:
        for start, width, owners in ((x, q, block.q_owners), (x + q, kv, block.kv_owners)):
            for i, owner in enumerate(owners):
                stripe = width / len(owners)
                corner = start + i * stripe, y + part * block.part
                axes.add_patch(Rectangle(corner, stripe, part, facecolor=_color(owner), edgecolor="none"))
    edge = {"edgecolor": DARK, "linewidth": 2} if block.own else {"edgecolor": "#a8a8a4", "linewidth": 1}
    axes.add_patch(Rectangle((x, y), q + kv, height, fill=False, linestyle="--" if block.hidden else "-", **edge))
    ink = "#767672" if block.hidden else DARK
    _text(axes, x + q / 2, y + height / 2, block.q, color=ink)
    _text(axes, x + q + kv / 2, y + height / 2, block.kv, color=ink)


def _sent_width(sent: Sent) -> float:
    return CHARACTER * (len(sent.label) + len(sent.to) + 4) + 10


def _draw_sent(axes: Axes, sent: Sent, x: float, y: float) -> None:
    """Draw a transfer: a pill in the colour of the shard's owner, and an arrow to the destination."""
    width = CHARACTER * len(sent.label) + 10
    _round(axes, x, y, width, SENT - 5, 9, _color(sent.owner))
    _text(axes, x + width / 2, y + 9, sent.label)
    _text(axes, x + width + 5, y + 9, f"\N{RIGHTWARDS ARROW} {sent.to}", ha="left")


def _color(rank: int) -> str:
    return COLORS[rank % len(COLORS)]


def _round(axes: Axes, x: float, y: float, width: float, height: float, radius: float, color: str) -> None:
    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="none"))


def _text(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    axes.text(x, y, text, **{"ha": "center", "va": "center", "color": DARK, "fontsize": 12, **options})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "draw only the schedule of this mesh shape"
    parser.add_argument("--tile", type=int, nargs=2, metavar=("A", "B"), help=text)
    parser.add_argument("--backward", action="store_true", help="with --tile: the backward pass")
    parser.add_argument("--output", type=Path, help="a file with --tile, else a folder")
    args = parser.parse_args()
    if args.tile:
        a, b = args.tile
        data = figure_data.mesh_figure(f"mesh shape ({a}, {b})", (a, b), (args.backward,))
        figures = {args.output or Path("schedule.svg"): data}
    else:
        folder = args.output or FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        figures = {folder / f"{name}.svg": make() for name, make in FIGURES.items()}
    for path, data in figures.items():
        save(data, path)
        print(path)


if __name__ == "__main__":
    main()
