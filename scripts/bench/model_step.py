"""Times whole training steps of each family and says where the time goes, patched on 1, 2, 4 ranks and unpatched.

    python scripts/bench/model_step.py [--family mplug_owl3 idefics ...] [--ranks 1 2 4] [--strategy lv-xattn]
        [--images 32] [--words 128] [--repeats 3] [--quick] [--device cpu|cuda] [--out rows.csv]

The models of `decode_models`: real classes of width 512 in 8 layers, two of them with cross-attention. A step is
forward, backward, the average of gradients over the ranks, and AdamW at a rate of zero, so that all steps compute the
same. The unpatched model takes its steps on rank 0, one after each step of the group, while the others wait: loss and
gradient norm must agree, and `ratio` is the patched step over the unpatched one, the median of such pairs. Where the
time goes is measured in steps of their own (`step_clock`): cross-attention and self-attention with their projections;
the vision tower with a resampler or projector; transfers, as far as computation does not hide them; averaging
gradients; the rest.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from decode_models import FAMILIES
from measure import environment
from rows import append, digits
from step_parts import PARTS
from step_runs import StepBench
from torch import multiprocessing

NAMES = [name for name in FAMILIES if name != "open_flamingo_all"]


@dataclass(frozen=True)
class Settings:
    """The command line, for every rank."""

    family: tuple[str, ...]
    ranks: tuple[int, ...]
    strategy: str
    images: int
    words: int
    repeats: int
    threads: int
    device: str


def main() -> None:
    """Measure, print a table, and append rows to a file when asked to."""
    settings, out = parse()
    torch.set_num_threads(settings.threads)
    where = environment(settings.device) | {"transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(HEAD)
    for ranks in settings.ranks:
        rows = measured(ranks, settings)
        if out is not None:
            append(out, [digits(row | where) for row in rows])


def parse() -> tuple[Settings, Path | None]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--strategy", default="lv-xattn", help="of the cross-attention; self-attention goes by ring")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--words", type=int, default=128, help="tokens of text, beside placeholders")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each process, on CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, less of everything")
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    args = vars(parser.parse_args())
    out = args.pop("out")
    if args.pop("quick"):
        least = {"images": 16, "words": 64, "repeats": 2}
        args |= {name: min(args[name], value) for name, value in least.items()}
        args["ranks"] = [n for n in args["ranks"] if n <= 2]
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
    rows = [row for name in settings.family for row in rows_of(name, settings)]
    if rank == 0:
        torch.save(rows, Path(folder) / "rows")
    dist.barrier()
    dist.destroy_process_group()


def rows_of(family: str, settings: Settings) -> list[dict[str, Any]]:
    """Patched and unpatched, of one family, the same on every rank; rank 0 prints them."""
    bench = StepBench(family, settings.images, settings.words, settings.strategy, torch.device(settings.device))
    rows = bench.rows(settings.repeats)
    if bench.comm.rank == 0:
        print("\n".join(text(row) for row in rows), flush=True)
    return rows


def text(row: dict[str, Any]) -> str:
    """A row of the table; parts as shares of a step."""
    shares = " ".join(f"{row[f'{part}_share']:>9.1%}" for part in PARTS)
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
    return f"{row['family']:>14} {row['ranks']:>5} {row['who']:>9} {row['step_s']:>8.3f} {ratio:>6} {shares}"


HEAD = f"{'family':>14} {'ranks':>5} {'who':>9} {'step, s':>8} {'ratio':>6} " + " ".join(f"{part:>9}" for part in PARTS)


if __name__ == "__main__":
    main()
