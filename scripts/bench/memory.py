"""What one training step holds of a video, for each strategy, with K and V recomputed in backward and without.

    python scripts/bench/memory.py [--family mplug_owl3 open_flamingo idefics] [--ranks 1 2 4] [--quick]
        [--device cpu|cuda] [--scale 16] [--frames F --text L] [--repeats 4] [--out rows.csv]

Real models with every width divided by --scale (`memory_models`), in bfloat16, real ranks; the step starts at the
features (`memory_measure`). Bytes are of the rank with most. Three kinds of rows:

    bytes     kept for backward and peak, at F and 2 F frames, beside the planner's estimate of the same
    largest   the most frames whose peak stays within one budget, the same for all: what lv-xattn without recomputation
              needs for 2 F frames, and 1% more. Lines through two sizes say where to look; measured there, and at one
              frame more on each rank
    cost      time of a step with recomputation over one without, both in each repetition: median of the ratios; for
              as many ranks as cores

The features are projected in chunks of a fixed size when K and V are recomputed; here they are chunks of the same share
of the video as that size is of 1,024 frames at full width on as many ranks.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from measure import environment
from memory_cost import cost_of
from memory_models import FAMILIES
from memory_steps import Bench, Mode
from rows import append, digits
from torch import multiprocessing

DEFAULTS = {"mplug_owl3": (4, 128), "open_flamingo": (32, 352), "idefics": (8, 128)}
"""Frames, and tokens of text, at which the smaller of the two sizes is measured."""

SLACK = 1.01
"""Strategies that differ by a few buffers of text get the same video."""


@dataclass(frozen=True)
class Settings:
    """The command line, for every rank."""

    family: tuple[str, ...]
    ranks: tuple[int, ...]
    scale: int
    frames: int | None
    text: int | None
    repeats: int
    cost_text: int
    threads: int
    device: str
    quick: bool


def main() -> None:
    """Measure on each number of ranks, print a table, and append rows to a file when asked to."""
    settings, out = parse()
    torch.set_num_threads(settings.threads)
    where = environment(settings.device) | {"transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    for ranks in settings.ranks:
        rows = measured(ranks, settings)
        if out is not None:
            append(out, [digits(row | where) for row in rows])


def parse() -> tuple[Settings, Path | None]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["mplug_owl3", "open_flamingo"], choices=list(FAMILIES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--scale", type=int, default=16, help="divides every width; 1 on a GPU")
    parser.add_argument("--frames", type=int, help="the smaller of the two sizes; by family when left out")
    parser.add_argument("--text", type=int, help="tokens; by family when left out")
    parser.add_argument("--cost-text", type=int, default=512, help="tokens of the steps that are timed; 0: time none")
    parser.add_argument("--repeats", type=int, default=4, help="of the steps that are timed")
    parser.add_argument("--threads", type=int, default=1, help="of each process, on CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, two strategies, few repetitions")
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    args = vars(parser.parse_args())
    out = args.pop("out")
    if args["quick"]:
        args |= {"ranks": [n for n in args["ranks"] if n <= 2], "repeats": 2, "cost_text": 128}
    settings = Settings(**args | {"family": tuple(args["family"]), "ranks": tuple(args["ranks"])})
    if settings.device == "cuda" and torch.cuda.device_count() < max(settings.ranks):
        parser.error(f"--ranks {max(settings.ranks)}: this machine has {torch.cuda.device_count()} GPUs")
    return settings, out


def measured(ranks: int, settings: Settings) -> list[dict[str, Any]]:
    """The rows of one number of ranks, which are processes."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (ranks, settings, folder), nprocs=ranks)  # type: ignore[attr-defined]
        return torch.load(Path(folder) / "rows")


def rank_main(rank: int, ranks: int, settings: Settings, folder: str) -> None:
    """One process of the group; rank 0 leaves the rows."""
    torch.set_num_threads(settings.threads)
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if settings.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    rows = rows_of(settings)
    if rank == 0:
        torch.save(rows, Path(folder) / "rows")
    dist.barrier()
    dist.destroy_process_group()


def rows_of(settings: Settings) -> list[dict[str, Any]]:
    """All rows of this group of ranks, the same on each; rank 0 prints them as they come."""
    rows: list[dict[str, Any]] = []
    for family in settings.family:
        frames, text = DEFAULTS[family]
        frames, text = settings.frames or frames, settings.text or text
        bench = Bench(family, settings.scale, text, torch.device(settings.device), largest=2 * frames)
        say = print if bench.comm.rank == 0 else _silent
        say(head(bench), flush=True)
        held = []
        for mode in modes(bench.comm.size, settings.quick):
            for count in (frames, 2 * frames):
                held.append(bench.facts(mode) | {"measure": "bytes"} | bench.held(mode, count))
                say(line(held[-1]), flush=True)
        largest = []
        for row in largest_rows(bench, held):
            largest.append(row)
            say(line(row), flush=True)
        rows += [*held, *largest]
        if settings.cost_text and (settings.device == "cuda" or bench.comm.size <= (os.cpu_count() or 1)):
            bench.text = settings.cost_text
            cost = cost_of(bench, 2 * frames, settings.repeats)
            rows.append(bench.facts(Mode("lv-xattn", True)) | {"measure": "cost"} | cost)
            say(line(rows[-1]), flush=True)
    return rows


def _silent(*_: Any, **__: Any) -> None:
    """What other ranks print."""


def modes(ranks: int, quick: bool) -> list[Mode]:
    """What is compared on so many ranks: all strategies where there are several meshes, lv-xattn on fewer ranks."""
    strategies = ["lv-xattn", "ring", "mesh", "ulysses", "replicate"]
    strategies = strategies[: 5 if ranks >= 4 else 1 + (quick and ranks > 1)]
    return [Mode(name, again) for name in strategies for again in (False, True)]


def largest_rows(bench: Bench, held: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The longest video of every mode in the bytes that the first one's peak took at the larger size."""
    budget, before = int(SLACK * held[1]["peak_bytes"]), dict[str, Any]()
    assert held[1]["strategy"] == "lv-xattn" and not held[1]["recompute"]
    for index in range(0, len(held), 2):
        small, large = held[index : index + 2]
        mode = Mode(small["strategy"], small["recompute"])
        fits = bench.largest_in(mode, budget, small, large)
        row = bench.facts(mode) | {"measure": "largest", "budget_bytes": budget} | fits
        if mode.recompute:  # its rows come after those of the same strategy without
            if before["frames"] and "capped" not in before:
                row["longer"] = fits["frames"] / before["frames"]
            grown = [held[i + 1]["planned_bytes"] - held[i]["planned_bytes"] for i in (index - 2, index)]
            row["planned_longer"] = grown[0] / grown[1]
        before = fits
        yield row


def head(bench: Bench) -> str:
    """Above the rows of one family on one number of ranks."""
    facts = bench.facts(Mode("lv-xattn", True))
    return (
        "\n{family}, {ranks} ranks, widths / {scale}, {text} tokens; {frame_bytes} bytes of features a frame, "
        "chunks of {chunk_bytes}\n".format(**facts)
        + f"{'strategy':<10} {'K and V':<10} {'frames':>7} {'kept MiB':>9} {'peak MiB':>9} {'planner':>8}"
    )


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    least = ">= " if "capped" in row else ""  # as many as the text has places for
    how = f"{row['strategy']:<10} {'again' if row['recompute'] else 'kept':<10} {least + str(row['frames']):>7}"
    mib = {name: f"{size / 2**20:.2f}" for name, size in row.items() if name.endswith("_bytes")}
    if row["measure"] == "bytes":
        return f"{how} {mib['kept_bytes']:>9} {mib['peak_bytes']:>9} {mib['planned_bytes']:>8}"
    if row["measure"] == "cost":
        return (
            f"{how} frames, {row['text']} tokens: a step takes {row['again_s']:.3f} s, with K and V kept "
            f"{row['kept_s']:.3f} s: {row['ratio']:.3f} times, {row['share']:.1%} of the step"
        )
    beyond = f"the next {mib['next_peak_bytes']}" if "next_peak_bytes" in mib else "the text has no place for more"
    if not row["frames"]:
        return f"{how} no frame on each rank fits in {mib['budget_bytes']} MiB ({mib['next_peak_bytes']})"
    longer = f": {least}{row['longer']:.2f} times, planner {row['planned_longer']:.2f}" if "longer" in row else ""
    return f"{how} frames fit in {mib['budget_bytes']} MiB ({mib['peak_bytes']}, {beyond}){longer}"


if __name__ == "__main__":
    main()
