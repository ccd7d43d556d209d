"""Draw the schedules of docs/figures, as the executor runs them.

    python scripts/docs/figures.py

A figure is a grid of ranks by steps. A cell holds the attention blocks that are computed, and the transfers that are
sent meanwhile. The figures replicate.svg, decoding.svg and star.svg show one collective each. They have no schedule and
are edited by hand.

A test compares the files with what this script draws.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from mllm_seqpar.masks import FrameMask
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.schedules import AttentionBlock, Transfer, schedule_for
from mllm_seqpar.schedules.head_sharding import HeadShards
from mllm_seqpar.sharding import FRAME_LAYOUTS, LAYOUTS, frame_spans, sequence_positions

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
COLORS = ("#f7b27a", "#9cc7ea", "#a8d59a", "#f6da74", "#cfaee6", "#8ed8cd", "#f4a3b5", "#cdc9a5")
"""Colours of the owner ranks, all light, so that dark text is readable on each."""
DARK, GREY = "#222222", "#666666"
# Sizes in points.
CHARACTER, BLOCK, SENT, PADDING, LINE, NARROWEST = 7.4, 26, 23, 8, 20, 560
CELL = "A cell: the attention blocks computed (Q shard, KV shard); below, the transfers sent meanwhile."
OWN = "Framed: this rank's Q shard with its own KV shard. Half filled: half of its queries."
MEANING = {
    "Q": "Q: queries",
    "O": "O: partial output and its log-sum-exp",
    "KV": "KV: keys and values",
    "Q+": "Q+: Q, dO, delta and the log-sum-exp of queries",
    "dQ": "dQ: partial gradient of Q",
    "dKV": "dKV: partial gradients of K and V",
}
Fraction = Callable[[int, int], float]
"""(Q shard, KV shard) -> fraction of the block's scores that the mask shows."""


@dataclass(frozen=True)
class Block:
    q: str  # label of the Q shard
    kv: str  # label of the KV shard
    q_owners: Sequence[int] = ()  # ranks, which give the colours; empty for replicated shards
    kv_owners: Sequence[int] = ()
    part: int = 0  # only queries from part/parts to (part + 1)/parts are computed
    parts: int = 1
    own: bool = False  # whether the computing rank owns both shards
    hidden: bool = False  # whether the mask hides the whole block


@dataclass(frozen=True)
class Sent:
    """A transfer that a rank sends: a shard owned by rank `owner`, and the destination."""

    label: str
    owner: int
    to: str


@dataclass(frozen=True)
class Cell:
    blocks: Sequence[Block] = ()
    sent: Sequence[Sent] = ()


@dataclass(frozen=True)
class Panel:
    """One pass: the names of its steps, and a (name, cells) row for each rank."""

    title: str
    steps: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class FigureData:
    """Panels one above the other, and the legend below them."""

    title: str
    panels: Sequence[Panel]
    legend: Sequence[str]


def transfer_label(transfer: Transfer, backward: bool) -> str:
    """Return the short name of what a transfer carries; see MEANING."""
    q_axis = transfer.axis == "q"
    if transfer.kind == "input":
        return ("Q+" if backward else "Q") if q_axis else "KV"
    return ("dQ" if backward else "O") if q_axis else "dKV"


def schedule_panel(
    title: str, mesh_shape: tuple[int, int], *, backward: bool, fraction: Fraction | None = None, pruned: bool = False
) -> Panel:
    """Return the panel of one pass; if `pruned`, Q shards are sent point-to-point, only where they attend to any
    key."""

    def block(b: AttentionBlock) -> Block:
        i, j = b.q_shard, b.kv_shard
        visible = 1.0 if fraction is None else fraction(i, j)
        kv = f"KV{j}" + (f" {visible:.0%}" if 0 < visible < 1 else "")
        return Block(f"Q{i}", kv, [i], [j], b.part, b.parts, i == j, visible == 0)

    def is_sent(transfer: Transfer, rank: int) -> bool:
        computed_by = transfer.dst if transfer.kind == "input" else rank
        return not (pruned and fraction and fraction(transfer.send_shard, computed_by) == 0)

    def sent(t: Transfer) -> Sent:
        return Sent(f"{transfer_label(t, backward)}{t.send_shard}", t.send_shard, str(t.dst))

    rows = []
    for rank in range(mesh_shape[0] * mesh_shape[1]):
        steps = schedule_for(mesh_shape, rank, backward=backward, direct=pruned)
        cells = [Cell([*map(block, s.blocks)], [sent(t) for t in s.transfers if is_sent(t, rank)]) for s in steps]
        rows.append((f"rank {rank}", cells))
    return Panel(title, [f"step {i + 1}" for i in range(len(rows[0][1]))], rows)


def legend_of(panels: Sequence[Panel]) -> str:
    labels = {sent.label.rstrip("0123456789") for p in panels for _, cells in p.rows for c in cells for sent in c.sent}
    return "; ".join(meaning for label, meaning in MEANING.items() if label in labels) + "."


def mesh_figure(title: str, mesh_shape: tuple[int, int]) -> FigureData:
    """Return the figure of a mesh shape, forward and backward."""
    panels = [schedule_panel("backward" if b else "forward", mesh_shape, backward=b) for b in (False, True)]
    return FigureData(title, panels, [CELL, OWN, legend_of(panels)])


def frame_mask() -> FigureData:
    """LV-XAttn under a mask: each of 16 queries attends to 6 of 16 frames."""
    rows = torch.arange(16)[None]
    mask = FrameMask.from_intervals((rows - 5).clamp(min=0), rows + 1, 1, 16)
    positions = [torch.arange(4 * rank, 4 * rank + 4) for rank in range(4)]
    blocks = frame_masks([mask.take(p) for p in positions], frame_spans(16, 4))
    visible_rows = blocks.visible_row_counts()
    panel = schedule_panel("forward", (4, 1), backward=False, fraction=lambda i, j: visible_rows[i][j] / 4, pruned=True)
    example = (
        "Example: 16 queries and 16 frames; query i attends to frames i - 5 to i. Percent: queries of the Q shard that "
        "attend to any key of the KV shard; only these are sent, point-to-point, and so are their results. Dashed: no "
        "query does."
    )
    title = "LV-XAttn under a mask that hides most frames, 4 ranks"
    return FigureData(title, [panel], [CELL, OWN, example, legend_of([panel])])


def frame_layouts() -> FigureData:
    """LV-XAttn in each layout of the frames: each of 16 rows attends to the frames up to its own of 16."""
    rows, panels = torch.arange(16)[None], []
    mask = FrameMask.from_intervals(torch.zeros_like(rows), rows + 1, 1, 16)
    masks = [mask.take(sequence_positions(16, rank, 4, "zigzag")) for rank in range(4)]
    owned = []
    for layout in FRAME_LAYOUTS:
        by_rank = frame_spans(16, 4, layout)
        blocks = frame_masks(masks, by_rank)
        visible = blocks.visible_fractions()
        loads = ", ".join(f"{sum(row[j] for row in visible) / blocks.visible_fraction / 4:.2f}" for j in range(4))
        fraction: Fraction = lambda i, j, visible=visible: visible[i][j]  # noqa: E731
        title = f"{layout} frames: the ranks compute {loads} of the mean"
        panels.append(schedule_panel(title, (4, 1), backward=False, fraction=fraction, pruned=True))
        frames = (" and ".join(f"{start} to {stop - 1}" for start, stop in spans) for spans in by_rank)
        owned.append(f"Frames of the ranks, {layout}: {'; '.join(frames)}.")
    example = (
        "16 rows of text, in the zigzag layout, and 16 frames; row i attends to frames 0 to i. Percent: visible "
        "fraction of the block's scores. Dashed: none, so the block is not computed, and its queries are not sent."
    )
    title = "LV-XAttn where rows attend to earlier frames only, forward, 4 ranks"
    return FigureData(title, panels, [CELL, OWN, *owned, example, legend_of(panels)])


def causal_layouts() -> FigureData:
    """Ring Attention over causal text in each layout."""
    panels = []
    for layout in LAYOUTS:
        positions = [torch.as_tensor(sequence_positions(16, rank, 4, layout)) for rank in range(4)]
        tokens = ", ".join(f"{rank}: {' '.join(map(str, p.tolist()))}" for rank, p in enumerate(positions))

        def fraction(i: int, j: int, positions: Sequence[Tensor] = positions) -> float:
            return float((positions[i][:, None] >= positions[j][None, :]).double().mean())

        title = f"{layout} (16 tokens; rank {tokens})"
        panels.append(schedule_panel(title, (1, 4), backward=False, fraction=fraction))
    percent = "Percent: visible fraction of the block's scores; dashed: none, so the block is not computed."
    return FigureData("Ring Attention over causal text, forward, 4 ranks", panels, [CELL, percent])


def ulysses() -> FigureData:
    """DeepSpeed-Ulysses, and the hybrid with a mesh between its groups."""
    plain = head_panel("4 ranks, 8 query heads, 2 KV heads: each KV head is sent to the 2 ranks that use it", 4, 8, 2)
    hybrid = head_panel("hybrid: heads sharded over 2 ranks, tile=(2, 1) between the 2 groups", 2, 4, 4, (2, 1))
    legend = ["h0-1: heads 0 and 1. Q0-1: the queries of ranks 0 and 1. O: output and its log-sum-exp."]
    return FigureData("DeepSpeed-Ulysses and the hybrid, forward", [plain, hybrid], legend)


def head_panel(title: str, size: int, heads: int, kv_heads: int, mesh_shape: tuple[int, int] = (1, 1)) -> Panel:
    """Return the forward pass of heads sharded over `size` ranks, with a mesh between the groups."""
    shards = HeadShards(heads, kv_heads, size)

    def span(indices: range) -> str:
        return str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"

    def members(group: int) -> range:
        return range(group * size, (group + 1) * size)

    rows = []
    for rank in range(size * mesh_shape[0] * mesh_shape[1]):
        group, member = divmod(rank, size)
        others = [(i, peer) for i, peer in enumerate(members(group)) if i != member]
        own_heads = span(shards.query_heads_of(member))

        def block(b: AttentionBlock, heads: str = own_heads) -> Block:
            q, kv = members(b.q_shard), members(b.kv_shard)
            return Block(f"Q{span(q)}", f"KV{span(kv)} h{heads}", [*q], [*kv], b.part, b.parts, q == kv)

        def sent(t: Transfer, member: int = member) -> Sent:
            label = f"{transfer_label(t, False)}{span(members(t.send_shard))}"
            return Sent(label, t.send_shard * size, str(t.dst * size + member))

        scatter = [
            Sent(f"Q{rank} h{span(shards.query_heads_of(i))}, KV{rank} h{span(shards.kv_heads_of(i))}", rank, str(peer))
            for i, peer in others
        ]
        steps = schedule_for(mesh_shape, group, backward=False)
        cells = [Cell([*map(block, step.blocks)], [*map(sent, step.transfers)]) for step in steps]
        merge = [Sent(f"O{peer} h{own_heads}", peer, str(peer)) for _, peer in others]
        rows.append((f"rank {rank}", [Cell((), scatter), *cells, Cell((), merge)]))
    count = len(rows[0][1]) - 2
    steps = ["compute"] if count == 1 else [f"step {i + 1}" for i in range(count)]
    return Panel(title, ["all-to-all", *steps, "all-to-all"], rows)


FIGURES: dict[str, Callable[[], FigureData]] = {
    "lv-xattn": lambda: mesh_figure("LV-XAttn, mesh shape (4, 1): Q shards move, KV shards stay", (4, 1)),
    "lv-xattn-mask": frame_mask,
    "lv-xattn-frames": frame_layouts,
    "ring": lambda: mesh_figure("Ring Attention, mesh shape (1, 4): KV shards move, Q shards stay", (1, 4)),
    "ring-causal": causal_layouts,
    "mesh": lambda: mesh_figure(
        "Mesh-Attention, mesh shape (3, 2), if every transfer takes as long as a block", (3, 2)
    ),
    "ulysses": ulysses,
}


def draw(data: FigureData) -> str:
    """Return an SVG image of the panels and the legend."""
    layouts = [_widths(panel) for panel in data.panels]
    width = max(NARROWEST, CHARACTER * len(data.title) * 1.25, *(left + sum(steps) for left, steps in layouts))
    shapes = [_text(PADDING, 19, data.title, anchor="start", size=16, weight="bold")]
    y = 40.0
    for panel, (left, steps) in zip(data.panels, layouts, strict=True):
        found, y = _panel(panel, y, left, steps)
        shapes += found
    for words in data.legend:
        for line in textwrap.wrap(words, int(1.15 * width / CHARACTER)):
            y += LINE
            shapes.append(_text(PADDING, y - 4, line, anchor="start", fill=GREY))
    size = f"{width + 2 * PADDING:g}", f"{y + 2 * PADDING:g}"
    head = 'xmlns="http://www.w3.org/2000/svg" font-family="DejaVu Sans, Verdana, sans-serif"'
    head += f' width="{size[0]}pt" height="{size[1]}pt" viewBox="0 0 {size[0]} {size[1]}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f"<svg {head}>", background, *shapes, "</svg>", ""])


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


def _panel(panel: Panel, y: float, left: float, widths: list[float]) -> tuple[list[str], float]:
    """Return a panel whose upper edge is `y`, and its lower edge."""
    shapes = [_text(PADDING, y + 11, panel.title, anchor="start", weight="bold")] if panel.title else []
    y += 28 if panel.title else 6
    lefts = [left + sum(widths[:i]) for i in range(len(widths))]
    shapes += [_text(x + w / 2, y + 9, name, fill=GREY) for x, w, name in zip(lefts, widths, panel.steps, strict=True)]
    y += 20
    for name, cells in panel.rows:
        blocks = max(len(cell.blocks) for cell in cells)
        columns = list(zip(lefts, widths, cells, _has_blocks(panel), strict=True))
        height = max(blocks * BLOCK * has + len(cell.sent) * SENT for _, _, cell, has in columns) + 3 * PADDING
        shapes.append(_text(PADDING, y + PADDING + 12, name, anchor="start", weight="bold"))
        for x, width, cell, has_blocks in columns:
            shapes.append(_rectangle(x + 2, y + 2, width - 4, height - 4, "#f6f6f4", radius=5))
            for i, block in enumerate(cell.blocks):
                shapes += _block(block, x + (width - sum(_halves(block))) / 2, y + PADDING + i * BLOCK)
            below = y + PADDING + (blocks * BLOCK + 4 if has_blocks else 0)
            if cell.sent and has_blocks:
                shapes.append(_rectangle(x + PADDING, below - 3, width - 2 * PADDING, 1, "#c8c8c4"))
            for i, sent in enumerate(cell.sent):
                shapes += _sent(sent, x + (width - _sent_width(sent)) / 2, below + i * SENT + 2)
        y += height
    return shapes, y + PADDING


def _halves(block: Block) -> tuple[float, float]:
    q, kv = (CHARACTER * max(len(label), 3) + 14 for label in (block.q, block.kv))
    return q, kv


def _block(block: Block, x: float, y: float) -> list[str]:
    """Return a block: the left half in the colours of the Q owners, the right half in those of the KV owners."""
    height, (q, kv), shapes = BLOCK - 5, _halves(block), []
    part = height / block.parts
    if not block.hidden:
        for start, width, owners in ((x, q, block.q_owners), (x + q, kv, block.kv_owners)):
            stripe = width / max(1, len(owners))
            shapes += [
                _rectangle(start + i * stripe, y + part * block.part, stripe, part, _color(owner))
                for i, owner in enumerate(owners)
            ]
    edge = f'stroke="{DARK}" stroke-width="2"' if block.own else 'stroke="#a8a8a4"'
    shapes.append(_rectangle(x, y, q + kv, height, "none", edge=edge + ' stroke-dasharray="4 2"' * block.hidden))
    ink = "#767672" if block.hidden else DARK
    shapes.append(_text(x + q / 2, y + height / 2, block.q, fill=ink))
    return [*shapes, _text(x + q + kv / 2, y + height / 2, block.kv, fill=ink)]


def _sent_width(sent: Sent) -> float:
    return CHARACTER * (len(sent.label) + len(sent.to) + 4) + 10


def _sent(sent: Sent, x: float, y: float) -> list[str]:
    """Return a transfer: a pill in the colour of the shard's owner, and an arrow to the destination."""
    width = CHARACTER * len(sent.label) + 10
    pill = _rectangle(x, y, width, SENT - 5, _color(sent.owner), radius=9)
    arrow = _text(x + width + 5, y + 9, f"\N{RIGHTWARDS ARROW} {sent.to}", anchor="start")
    return [pill, _text(x + width / 2, y + 9, sent.label), arrow]


def _color(rank: int) -> str:
    return COLORS[rank % len(COLORS)]


def _rectangle(x: float, y: float, width: float, height: float, fill: str, *, radius: int = 0, edge: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="{radius}" fill="{fill}" {edge}/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, weight: str = "normal", fill: str = DARK
) -> str:
    """Return text whose middle has the height `y`."""
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" dominant-baseline="central" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    for name, make in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(make()))
