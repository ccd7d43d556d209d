"""The table of all benchmarks. Runs those of `docs/benchmarks.md`, and updates the page from their rows.

    python scripts/bench/run_all.py [--only network-paper memory ...] [--out docs] [--quick]
    python scripts/bench/run_all.py --only host-path kernels        benchmarks that print a table
    python scripts/bench/run_all.py --report        update the page from existing rows

Each run replaces its rows in `docs/benchmarks/<run>.csv`; benchmarks that are not run, or fail, keep theirs. Figures
need matplotlib (the extra `plot`); the network's runs need root. On a cluster, start each benchmark as its own help
says, with `--out docs/benchmarks/<run>.csv`, and run this script with --report.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"
RUNS = {
    "network-paper": "network.py --suite paper --repeats 4 --out",
    "network-tiles": "network.py --suite tiles --out",
    "network-real": "network.py --suite real --out",
    "end-to-end": "network.py --suite steps real-steps --repeats 3 --out",
    "memory": "memory.py --out",
    "decoder-only": "decoder_only.py --part memory --out",
    "decoder-only-questions": "decoder_only.py --part questions --frames 512 --out",
    "decode": "decode.py --images 64 256 --family idefics open_flamingo mllama mplug_owl3 --out",
    "kernels": "kernels.py",
    "host-path": "host_path.py",
    "wide": "host_path.py --wide --repeats 9",
    "paper-tables": "paper_tables.py",
    "scale": "scale.py --model mplug-owl3-7b --text 8192 --cluster a100-80g-8xN",
    "video": "video.py --out",
}
"""The command of each run. If it ends with --out, the file of its rows follows; others print a table only."""
QUICK = {"network.py": "--repeats 1", "memory.py": "--quick", "decode.py": "--images 16 --repeats 1 --tokens 8"}
QUICK |= {"video.py": "--kinds h264-720p --fps 1 --seconds 10 --repeats 1"}
QUICK |= {"decoder_only.py": "--frames 16 --ranks 1 2 --rounds 1"}
QUICK |= {"host_path.py": "--repeats 2 --tokens 4", "end-to-end": "--repeats 1 --suite smallest-steps"}
"""Options that make a run, or all runs of a script, short; they follow and override those of the command."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=[name for name in RUNS if writes_rows(name)])
    parser.add_argument("--out", type=Path, default=PAGE.parent, help="folder of the page")
    parser.add_argument("--quick", action="store_true", help="short runs, to check that everything works")
    parser.add_argument("--report", action="store_true", help="run nothing, only update the page")
    args = parser.parse_args()
    folder, page = args.out / "benchmarks", args.out / PAGE.name
    folder.mkdir(parents=True, exist_ok=True)
    failed = [] if args.report else [name for name in args.only if not run(name, folder, args.quick)]
    page.write_text(report.update((page if page.exists() else PAGE).read_text(), folder))
    print(f"wrote {page}")
    if failed:
        raise SystemExit(f"run_all.py: {', '.join(failed)} failed, see above; the page keeps their previous rows")


def run(name: str, folder: Path, quick: bool) -> bool:
    """Run one benchmark and replace its rows if it succeeds; return whether it does."""
    script, *options = RUNS[name].split()
    new, start = folder / f"{name}.csv.new", time.monotonic()
    new.unlink(missing_ok=True)
    rows = [str(new)] if writes_rows(name) else []
    command = [sys.executable, str(HERE / script), *options, *rows]
    command += QUICK.get(name, QUICK.get(script, "")).split() if quick else []
    print(f"== {name}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command)
    print(f"== {name}: status {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
    succeeded = done.returncode == 0 and (not rows or new.exists())
    if succeeded and rows:
        new.replace(folder / f"{name}.csv")
    new.unlink(missing_ok=True)
    return succeeded


def writes_rows(name: str) -> bool:
    """Return whether a run writes rows, which the page shows; the others print a table."""
    return RUNS[name].endswith("--out")


if __name__ == "__main__":
    main()
