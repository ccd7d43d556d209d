"""Time whole training steps over links of a given speed, with every strategy of cross-attention in the same run.

    python scripts/bench/end_to_end.py [--suite emulated real] [--cases a100-owl3 ...] [--repeats 3] [--out rows.csv]

Ranks are processes in network namespaces of their own with capped links (see `namespaces`) and use gloo; this needs
root. A step is forward, backward, the average of gradients and AdamW of a real model at a small width. Blocks are real
on 2 ranks and emulated on 8, as in `network.py`. Queries to keys, a block's time to a transfer's time, and
cross-attention's time to the rest of the step are those of the paper's table, or as near to them as the rest of the
model allows (`cross_share`). Loss and gradient norm of all modes agree in every step. `none` is LV-XAttn without the
transfers of cross-attention. `predicted` adds to a step of `none` what they add to the planner's time of the calls.

Ratios are those of steps in the same repetition, their median. `auto_over_best` compares "auto" with the mode that is
fastest by its median; `spread` is the range of times over their median, for whichever of the two has the larger one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from statistics import median
from typing import Any

import report
import torch
import torch.distributed as dist
from end_to_end_cases import RANKS, SUITES, Case, cases
from end_to_end_run import Measured, StepBenchmark
from measure import environment
from namespaces import launch, obstacle
from network import columns_of
from network_run import Link
from rows import append, as_text, digits

from mllm_seqpar.comm import as_communicator


def main() -> None:
    args = parse()
    if args.rank_of:
        rank_main(args)
        return
    if reason := obstacle():
        raise SystemExit(f"end_to_end.py: {reason}")
    for suite in args.suite:
        status = launch(RANKS[suite], [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--rank-of", suite])
        if status:
            raise SystemExit(f"end_to_end.py: one of {RANKS[suite]} ranks ended with status {status}; see above")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.setting.name for case in cases("emulated")]
    suites = "; ".join(f"{name}: {what}" for name, what in SUITES.items())
    parser.add_argument("--suite", nargs="+", default=["emulated", "real"], choices=list(SUITES), help=suites)
    parser.add_argument("--cases", nargs="+", default=names, choices=names)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of modes")
    parser.add_argument("--out", help="append a row per case and mode to this CSV file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def rank_main(args: argparse.Namespace) -> None:
    """Measure, as one rank, all cases of a suite."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.getLogger("mllm_seqpar").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    comm, link = as_communicator(None), Link()
    machine = environment("cpu")
    for case in cases(args.rank_of):
        if case.setting.name not in args.cases:
            continue
        load = os.getloadavg()[0]
        found = StepBenchmark(case, comm).run(args.repeats, args.seed, link)
        if comm.rank == 0:
            rows = [row | {"load": load} for row in rows_of(case, found)]
            print(f"\n{summary(rows)}", flush=True)
            if args.out:
                append(args.out, [digits(row | machine) for row in rows])
    comm.gather_ints([0])  # a rank that exits early closes its connections while other ranks still use them
    dist.destroy_process_group()


def rows_of(case: Case, found: Measured) -> list[dict[str, Any]]:
    """Return one row per mode; times of the ring and of LV-XAttn in the paper are those of whole steps."""
    setting, times = case.setting, found.seconds
    cross_s = case.layers * setting.ranks * sum(found.block)
    common = {"benchmark": "end_to_end"} | columns_of(setting, found.block[0], found.mbit, found.speed)
    common |= {"layers": case.layers, "rest_s": found.rest_s, "cross_share": cross_s / (found.own_s + found.rest_s)}
    if (paper := setting.paper) is not None:
        common |= {"paper_ring_s": paper.step_seconds["ring"], "paper_lv_xattn_s": paper.step_seconds["lv-xattn"]}
        common |= {"paper_cross_share": paper.seconds["lv-xattn"] / paper.step_seconds["lv-xattn"]}
    best = min((name for name in times if name not in ("none", "auto")), key=lambda name: median(times[name]))
    common |= {"selected": found.selected, "best": best, "auto_over_best": _ratio(times["auto"], times[best])}
    common |= {"spread": max((max(times[mode]) - min(times[mode])) / median(times[mode]) for mode in (best, "auto"))}
    rows = []
    for mode, seconds in times.items():
        row = common | {"mode": mode, "repeats": len(seconds), "seconds": median(seconds)}
        row |= {"least_s": min(seconds), "most_s": max(seconds), "over_none": _ratio(seconds, times["none"])}
        row |= {"over_lv_xattn": _ratio(seconds, times["lv-xattn"]), "sent_bytes": found.sent[mode]}
        rows.append(row | {"predicted_s": found.predicted[mode]})
    return rows


def _ratio(seconds: list[float], others: list[float]) -> float:
    return median(x / y for x, y in zip(seconds, others, strict=False))  # slow modes have fewer repetitions


def summary(rows: list[dict[str, Any]]) -> str:
    lines = as_text(rows)
    return f"{report.setting_table(lines)}\n\n{report.step_table([lines])}"


if __name__ == "__main__":
    main()
