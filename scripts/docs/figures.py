"""Draws the figures of docs/, from the schedules that the executor runs.

    python scripts/docs/figures.py                                               # all of docs/figures
    python scripts/docs/figures.py --tile 4 2 --backward --output mesh.svg       # a tile of one's own

Whole figures and nothing random: the same code draws the same bytes. Where a strategy sends without a schedule (one
gather, one merge), it is run on small tensors and what its ranks sent is drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from grid import Cell, Chip, Panel, draw
from panels import Recorder, Tile, causal_share, legend_of, of_heads, of_schedule

from mllm_seqpar.attention.decode import SCATTER_ROWS, merge_over_ranks
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.autograd import gather_shards
from mllm_seqpar.comm.loopback import run_loopback
from mllm_seqpar.masks import FrameBlockMasks, FrameMask
from mllm_seqpar.runtime.star import StarText
from mllm_seqpar.schedules import schedule_for
from mllm_seqpar.sharding import LAYOUTS, frame_bounds, sequence_positions

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "figures"
HOW = "In a cell: the blocks computed (queries of a rank, keys and values of a rank); below, what leaves meanwhile."
OWN = "Framed: a rank's own queries with its own keys. Half filled: with half of its queries."


def tile_figure(title: str, tile: Tile, passes: tuple[bool, ...] = (False, True)) -> str:
    """A tile's schedule, forward and backward."""
    drawn = [of_schedule("backward" if back else "forward", tile, backward=back) for back in passes]
    names = set().union(*(found for _, found in drawn))
    return draw(title, [panel for panel, _ in drawn], [HOW, OWN, legend_of(sorted(names))])


def direct() -> str:
    """LV-XAttn under a mask: each of 16 rows sees the 6 frames up to its own place among 16."""
    rows = torch.arange(16)[None]
    mask = FrameMask.from_intervals((rows - 5).clamp(min=0), rows + 1, 1, 16)
    places = [torch.arange(4 * rank, 4 * rank + 4) for rank in range(4)]
    blocks = FrameBlockMasks([mask.take(place) for place in places], frame_bounds(16, 4))
    assert blocks.prunes
    seen = blocks.visible_row_counts()
    panel, names = of_schedule(
        "forward", (4, 1), backward=False, direct=True, share=lambda i, j: seen[i][j] / 4, spares=True
    )
    example = (
        "Example: 16 queries, 16 frames; each query sees the 6 frames up to its own place. Percent: share of a rank's "
        "queries that see any of the keys; only these travel, straight there and back. Dashed: none sees any."
    )
    title = "LV-XAttn under a mask that hides most frames, 4 ranks"
    return draw(title, [panel], [HOW, OWN, example, legend_of(sorted(names))])


def layouts() -> str:
    """Ring Attention over causal text, dealt in each layout."""
    panels = []
    for layout in LAYOUTS:
        positions = [sequence_positions(16, rank, 4, layout) for rank in range(4)]
        dealt = ", ".join(f"{rank}: {' '.join(map(str, p.tolist()))}" for rank, p in enumerate(positions))
        title = f"{layout} (16 tokens; rank {dealt})"
        panels.append(of_schedule(title, (1, 4), backward=False, share=causal_share(positions))[0])
    shares = "Percent: share of a block's scores that causal text sees; dashed: none, nothing is computed."
    return draw("Ring Attention over causal text, forward, 4 ranks", panels, [HOW, shares])


def by_heads() -> str:
    """Ulysses, and its hybrid."""
    panels = [
        of_heads("4 ranks, 8 query heads, 2 key heads: each key head goes to the 2 ranks that use it", 4, 8, 2),
        of_heads("hybrid: heads dealt to 2 ranks at a time, tile (2, 1) between the 2 groups", 2, 4, 4, (2, 1)),
    ]
    legend = ["h0-1: heads 0 and 1. Q0-1: the queries of ranks 0 and 1. O: output and its log-sum-exp."]
    return draw("DeepSpeed-Ulysses and the hybrid, forward", panels, legend)


def replicate() -> str:
    """Gathering of features, from a run."""

    def one_rank(comm: Communicator) -> tuple[list, list]:
        recorder = Recorder(comm)
        features = torch.ones(1, 1, 1, requires_grad=True)
        sum((part * 2).sum() for part in gather_shards(features, recorder)).backward()
        return recorder.leaving(0, "y{}", ""), recorder.leaving(1, "", "dy{1}")

    runs = run_loopback(4, one_rank)
    rows = []
    for rank, (gathered, reduced) in enumerate(runs):
        whole = [Chip(f"Q{rank}", f"KV{j}", [rank], [j], own=rank == j) for j in range(len(runs))]
        rows.append((f"rank {rank}", [Cell((), gathered), Cell(whole), Cell(whole), Cell((), reduced)]))
    steps = ["once: gather", "each layer, forward", "each layer, backward", "once: reduce-scatter"]
    legend = ["y: features of a rank's frames; dy: their gradient, to the rank they belong to, which adds them up."]
    legend += [
        "K and V are projected from the gathered features by every rank: the blocks of a row are computed as one."
    ]
    return draw('Replication (strategy="replicate"), 4 ranks', [Panel("", steps, rows)], legend)


def decoding() -> str:
    """The merge of replicated queries' partial results, from runs with few rows and with many."""

    def one_rank(comm: Communicator, rows: int) -> Recorder:
        recorder = Recorder(comm)
        merge_over_ranks(torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, rows), recorder)
        return recorder

    few = ["compute", "all-gather"], [("O{}", "")]
    many = ["compute", "exchange of shares", "all-gather"], [("", "O{0} share {1}"), ("merged {}", "")]
    panels = []
    for rows, (steps, names) in ((1, few), (SCATTER_ROWS, many)):
        cells = []
        for rank, recorder in enumerate(run_loopback(4, one_rank, rows)):
            assert len(recorder.exchanges) == len(names)
            sent = [Cell((), recorder.leaving(i, *name)) for i, name in enumerate(names)]
            cells.append((f"rank {rank}", [Cell([Chip("Q", f"KV{rank}", [], [rank])]), *sent]))
        what = "a new token" if rows == 1 else f"{rows} rows or more: each rank merges its share of them"
        panels.append(Panel(what, steps, cells))
    legend = ["Q is the same on every rank; K and V stay where they are. O: partial output and its log-sum-exp."]
    return draw("Decoding: replicated queries over dealt keys, 4 ranks", panels, legend)


def star() -> str:
    """What Star Attention computes: in the context each rank the anchor and its own block, and nothing travels."""

    def text_of(comm: Communicator) -> StarText:
        return StarText(1, 17, comm)

    rows = []
    for rank, text in enumerate(run_loopback(4, text_of)):
        (step,) = schedule_for((1, 1), rank, backward=False)
        assert not step.transfers
        read = [int(part[0]) // text.block for part in text.positions(rank).split(text.block) if part[0] < text.length]
        seen = [(row, column) for i, row in enumerate(read) for column in read[: i + 1]]
        chips = [Chip(f"c{i + 1}", f"c{j + 1}", [i], [j], note="causal" if i == j else "") for i, j in seen]
        rows.append((f"rank {rank}", [Cell(chips), Cell([Chip("Q", f"KV{rank}", [], [rank])])]))
    panel = Panel("", ["context: nothing travels", "query, new tokens"], rows)
    legend = ["c1 to c4: the context's blocks, left as queries, right as keys. c1, the anchor, is read by all ranks."]
    legend += [
        "The query and new tokens attend to all K and V that ranks keep; their results are merged as in decoding."
    ]
    return draw('Star Attention (self_attention="star"), 4 ranks', [panel], legend)


FIGURES: dict[str, Callable[[], str]] = {
    "lv-xattn": lambda: tile_figure("LV-XAttn, tile (4, 1): queries go round, keys stay", (4, 1)),
    "lv-xattn-mask": direct,
    "ring": lambda: tile_figure("Ring Attention, tile (1, 4): keys go round, queries stay", (1, 4)),
    "ring-causal": layouts,
    "mesh": lambda: tile_figure("Mesh-Attention, tile (3, 2) of 6 ranks, every transfer as long as a block", (3, 2)),
    "ulysses": by_heads,
    "replicate": replicate,
    "decoding": decoding,
    "star": star,
}


def main() -> None:
    """Writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tile", type=int, nargs=2, metavar=("A", "B"), help="draw this tile's schedule only")
    parser.add_argument("--backward", action="store_true", help="the backward pass of that tile")
    parser.add_argument("--output", type=Path, help="a file for that tile's figure, or a folder for all")
    args = parser.parse_args()
    if args.tile:
        a, b = args.tile
        drawn = {args.output or Path("schedule.svg"): tile_figure(f"tile ({a}, {b})", (a, b), (args.backward,))}
    else:
        folder = args.output or FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        drawn = {folder / f"{name}.svg": make() for name, make in FIGURES.items()}
    for path, picture in drawn.items():
        path.write_text(picture)
        print(path)


if __name__ == "__main__":
    main()
