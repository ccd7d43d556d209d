"""Runs all benchmarks and writes `docs/benchmarks.md`, with tables and figures, from their rows.

    python scripts/bench/run_all.py [--only network-paper memory ...] [--out docs] [--quick]
    python scripts/bench/run_all.py --report        the page alone, from the rows that are there

Each run replaces its rows, `docs/benchmarks/<run>.csv`; what is not run keeps those it has. Figures need matplotlib
(the extra `plot`). The network's runs need root; where one cannot be made the page keeps its former rows. On a cluster:
the runs by hand, as their own help says, with `--out docs/benchmarks/<run>.csv`; then --report here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import report_decode
import report_memory
import report_model_step
import report_network

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """One command; `quick`: further arguments that make it short; `rows`: its option for the file of rows."""

    command: tuple[str, ...]
    quick: tuple[str, ...] = ()
    rows: str = "--out"


RUNS = {
    "network-paper": Run(("network.py", "--suite", "paper", "--repeats", "4"), ("--repeats", "1")),
    "network-tiles": Run(("network.py", "--suite", "tiles"), ("--repeats", "1")),
    "network-real": Run(("network.py", "--suite", "real"), ("--repeats", "1")),
    "memory": Run(("memory.py",), ("--quick",)),
    "model_step": Run(("model_step.py",), ("--quick",)),
    "decode": Run(
        ("decode.py", "--images", "64", "256", "--family", "idefics", "open_flamingo", "mllama", "mplug_owl3"),
        ("--images", "16", "--repeats", "1", "--tokens", "8"),
        "--csv",
    ),
}
SECTIONS: list[Callable[[Path], str | None]] = [
    report_network.section,
    report_memory.section,
    report_model_step.section,
    report_decode.section,
]


def main() -> None:
    """Run what was asked for, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "docs", help="folder of the page")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that everything works")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args()
    folder = args.out / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    failed = [] if args.report else [name for name in args.only if not made(name, folder, args.quick)]
    page = args.out / "benchmarks.md"
    page.write_text(written(folder))
    print(f"wrote {page}")
    if failed:
        raise SystemExit(f"run_all.py: {', '.join(failed)} failed, see above; the page has their former rows, if any")


def made(name: str, folder: Path, quick: bool) -> bool:
    """Runs one benchmark; its rows replace the former ones when it has ended well."""
    run, new, start = RUNS[name], folder / f"{name}.csv.new", time.monotonic()
    new.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / run.command[0]), *run.command[1:], *(run.quick if quick else ())]
    print(f"== {name}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run([*command, run.rows, str(new)])
    print(f"== {name}: status {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode == 0 and new.exists():
        new.replace(folder / f"{name}.csv")
        return True
    new.unlink(missing_ok=True)
    return False


def written(folder: Path) -> str:
    """The page."""
    sections = filter(None, (section(folder) for section in SECTIONS))
    return "\n\n".join([INTRODUCTION, *sections]).rstrip() + "\n"


INTRODUCTION = """\
# Benchmarks

Written by `python scripts/bench/run_all.py` from the rows in `docs/benchmarks/`, which name hardware, versions and
commit (`+`: with changes that were not committed); do not edit it by hand. Everything here ran on small machines:
sizes are scaled down, each section says how and why, and the paper's own figures (LV-XAttn, arXiv 2502.02406) stand
beside ours where there are any. On a cluster the same scripts run on CUDA with NCCL."""


if __name__ == "__main__":
    main()
