"""The table of all benchmarks. Runs those of `docs/benchmarks.md`, and updates the page from their rows.

    python scripts/bench/run_all.py [--only network-paper memory ...] [--out docs] [--quick]
    python scripts/bench/run_all.py --only host-path kernels        benchmarks that print a table
    python scripts/bench/run_all.py --only gpu      on a machine with a GPU
    python scripts/bench/run_all.py --report        update the page from existing rows

Each run replaces its rows in `docs/benchmarks/<run>.jsonl`; benchmarks that are not run, or fail, keep theirs. Figures
need matplotlib (the extra `plot`); the network's runs need root. On a cluster, start each benchmark as its own help
says, with `--out docs/benchmarks/<run>.jsonl`, and run this script with --report.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import report
from harness import Row

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"


class Case(NamedTuple):
    """A benchmark: its command, what to add for a short run, and the tables and the figure of its part of the page.

    Without tables, it only prints.
    """

    command: str
    quick: str = ""
    tables: Callable[[Sequence[Row]], str] | None = None
    figure: Callable[[Sequence[Row], Path], str] | None = None


CASES = {
    "network-paper": Case(
        "network.py --suite paper --repeats 4", "--repeats 1 --settings a100-owl3", report.network_tables
    ),
    "network-tiles": Case("network.py --suite tiles", "--repeats 1 --settings 4-ranks-128x2048", report.network_tables),
    "network-real": Case("network.py --suite real", "--repeats 1 --settings a100-flamingo", report.network_tables),
    "end-to-end": Case(
        "network.py --suite steps real-steps --repeats 3",
        "--repeats 1 --suite real-steps --settings a30-flamingo",
        report.network_tables,
    ),
    "memory": Case("memory.py", "--ranks 1 2 --repeats 2 --cost-text 128", report.memory_tables, report.memory_figure),
    "memory-million": Case(
        "memory.py --family moss_vl --scale 64 --frames 16 --frame-tokens 65536 --text 24",
        "--ranks 1 2 --frame-tokens 256",
        report.memory_tables,
    ),
    "decoder-only": Case("decoder_only.py --part memory", "--frames 16 --ranks 1 2", report.decoder_only_table),
    "decoder-only-questions": Case(
        "decoder_only.py --part questions --frames 512",
        "--frames 16 --ranks 1 2 --rounds 1",
        report.questions_table,
    ),
    "decode": Case(
        "one_process.py --runs decode --wide --images 64 256 --prompt 32 --tokens 32 --repeats 3",
        "--images 16 --repeats 1 --tokens 8",
        report.decoding_table,
        report.decoding_figure,
    ),
    "gpu": Case("gpu.py", "--tiny", report.gpu_tables),
    "kernels": Case("kernels.py"),
    "host-path": Case("one_process.py", "--repeats 2 --tokens 4"),
    "block-host-path": Case("host_path.py", "--repeats 2"),
    "wide": Case("one_process.py --wide --repeats 9", "--repeats 2 --tokens 4"),
    "paper-tables": Case("paper_tables.py"),
    "scale": Case("scale.py --model mplug-owl3-7b --text 8192 --cluster a100-80g-8xN"),
}
DEFAULT = [name for name, case in CASES.items() if case.tables is not None and name != "gpu"]
"""Benchmarks that run unless others are named: those that need no GPU."""
PARTS = {
    name: partial(report.part, name=name, tables=case.tables, figure=case.figure)
    for name, case in CASES.items()
    if case.tables is not None
} | {"headline": report.headline, "network-error": report.network_error}
"""The generated parts of the page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=DEFAULT)
    parser.add_argument("--out", type=Path, default=PAGE.parent, help="folder of the page")
    parser.add_argument("--quick", action="store_true", help="short runs, to check that everything works")
    parser.add_argument("--report", action="store_true", help="run nothing, only update the page")
    args = parser.parse_args()
    folder, page = args.out / "benchmarks", args.out / PAGE.name
    folder.mkdir(parents=True, exist_ok=True)
    failed = [] if args.report else [name for name in args.only if not run(name, folder, args.quick)]
    page.write_text(report.update((page if page.exists() else PAGE).read_text(), folder, PARTS))
    print(f"wrote {page}")
    if failed:
        raise SystemExit(f"run_all.py: {', '.join(failed)} failed, see above; the page keeps their previous rows")


def run(name: str, folder: Path, quick: bool) -> bool:
    """Run one benchmark and replace its rows if it succeeds; return whether it does."""
    case = CASES[name]
    script, *options = case.command.split()
    new, start = folder / f"{name}.jsonl.new", time.monotonic()
    new.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / script), *options, *(case.quick.split() if quick else [])]
    command += ["--out", str(new)] if case.tables else []
    print(f"== {name}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command)
    print(f"== {name}: status {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
    succeeded = done.returncode == 0 and (case.tables is None or new.exists())
    if succeeded and case.tables:
        new.replace(folder / f"{name}.jsonl")
    new.unlink(missing_ok=True)
    return succeeded


if __name__ == "__main__":
    main()
