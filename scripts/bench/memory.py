"""Measure the memory of one training step per strategy, with K and V recomputed in backward and without.

    python scripts/bench/memory.py [--family mplug_owl3 open_flamingo idefics] [--ranks 1 2 4] [--quick]
        [--device cpu|cuda] [--scale 16] [--frames F --text L] [--repeats 4] [--out rows.csv]

The models are the real classes with every width divided by --scale (see `models`), in bfloat16, on real ranks. A
step starts at the visual features. Bytes are those of the rank with the most. There are three kinds of rows:

    bytes     bytes saved for backward and peak, with F and 2 F frames, beside the planner's estimate of the peak
    largest   the longest video whose peak stays within one budget for all modes: the peak of lv-xattn without
              recomputation with 2 F frames, plus 1%
    cost      time of a step with recomputation over one without, the median over repetitions that time both; only for
              as many ranks as there are cores

With recomputation, the features are projected in chunks of a fixed size. Here the chunks have the same fraction of the
video as the published size has of 1,024 frames at full width.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import torch
import transformers
from measure import environment, run_on_ranks
from memory_run import MemoryBenchmark, Mode
from models import PUBLISHED
from rows import append, as_text, digits

DEFAULTS = {"mplug_owl3": (4, 128), "open_flamingo": (32, 352), "idefics": (8, 128)}
"""Frames and text tokens of the smaller of the two sizes."""
SLACK = 1.01
"""Budget over the peak it comes from, so that small differences of text buffers do not change the longest video."""


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    machine = environment(args.device) | {"transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for ranks in args.ranks:
        rows = run_on_ranks(ranks, args.device, args.threads, rows_of, args)[0]
        if args.out is not None:
            append(args.out, [digits(row | machine) for row in rows])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["mplug_owl3", "open_flamingo"], choices=list(PUBLISHED))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--scale", type=int, default=16, help="divisor of all widths; use 1 on a GPU")
    parser.add_argument("--frames", type=int, help="frames of the smaller size (default: by family)")
    parser.add_argument("--text", type=int, help="text tokens (default: by family)")
    parser.add_argument("--cost-text", type=int, default=512, help="text tokens of the timed steps; 0: time none")
    parser.add_argument("--repeats", type=int, default=4, help="repetitions of the timed steps")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process, on CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, two strategies, few repetitions")
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    args = parser.parse_args(argv)
    if args.quick:
        args.ranks, args.repeats, args.cost_text = [n for n in args.ranks if n <= 2], 2, 128
    if args.device == "cuda" and torch.cuda.device_count() < max(args.ranks):
        parser.error(f"--ranks {max(args.ranks)}: this machine has {torch.cuda.device_count()} GPUs")
    return args


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure on this group of ranks; return all rows, the same on each rank. Rank 0 prints them."""
    rows: list[dict[str, Any]] = []
    for family in args.family:
        frames, text = DEFAULTS[family]
        frames, text = args.frames or frames, args.text or text
        bench = MemoryBenchmark(family, args.scale, text, torch.device(args.device), largest=2 * frames)
        found = [
            bench.columns(mode) | {"measure": "bytes"} | bench.step_bytes(mode, count)
            for mode in modes(bench.comm.size, args.quick)
            for count in (frames, 2 * frames)
        ]
        found += list(largest_rows(bench, found))
        if args.cost_text and (args.device == "cuda" or bench.comm.size <= (os.cpu_count() or 1)):
            bench.text = args.cost_text
            cost = bench.recomputation_cost(2 * frames, args.repeats)
            found.append(bench.columns(Mode("lv-xattn", True)) | {"measure": "cost"} | cost)
        if bench.comm.rank == 0:
            print(f"\n{report.memory_of_family(as_text(found))}", flush=True)
        rows += found
    return rows


def modes(ranks: int, quick: bool) -> list[Mode]:
    """Return the modes to compare: all strategies from 4 ranks on, where meshes differ from them; else lv-xattn."""
    strategies = ["lv-xattn", "ring", "mesh", "ulysses", "replicate"]
    strategies = strategies[: 5 if ranks >= 4 else 1 + (quick and ranks > 1)]
    return [Mode(name, recompute) for name in strategies for recompute in (False, True)]


def largest_rows(bench: MemoryBenchmark, measured: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the longest video of every mode; the budget comes from the first mode's peak at the larger size."""
    budget, before = int(SLACK * measured[1]["peak_bytes"]), dict[str, Any]()
    assert measured[1]["strategy"] == "lv-xattn" and not measured[1]["recompute"]
    for index in range(0, len(measured), 2):
        small, large = measured[index : index + 2]
        mode = Mode(small["strategy"], small["recompute"])
        fits = bench.largest_in(mode, budget, small, large)
        row = bench.columns(mode) | {"measure": "largest", "budget_bytes": budget} | fits
        if mode.recompute:  # `before` is the same strategy without recomputation
            if before["frames"] and "capped" not in before:
                row["longer"] = fits["frames"] / before["frames"]
            growth = [measured[i + 1]["planned_bytes"] - measured[i]["planned_bytes"] for i in (index - 2, index)]
            row["planned_longer"] = growth[0] / growth[1]
        before = fits
        yield row


if __name__ == "__main__":
    main()
