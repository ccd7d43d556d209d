"""Time cross-attention, or whole training steps, over links of a given speed, with every strategy in the same run.

    python scripts/bench/network.py --suite paper|tiles|real [--ranks 8] [--repeats 5] [--out rows.csv]
    python scripts/bench/network.py --suite steps real-steps [--settings a100-owl3 ...] [--repeats 3] [--out rows.csv]
    torchrun --nproc-per-node 8 scripts/bench/network.py --suite full --no-namespaces [--out rows.csv]

Suites: `paper` (the proportions of the paper's clusters, emulated blocks, 8 ranks), `tiles` (all mesh shapes on both
sides of the crossover, emulated blocks, 4 to 8 ranks), `real` (as `paper`, with real blocks, 2 ranks), `full` (the
paper's unscaled lengths, on the GPUs of a launcher); whole training steps in `steps` (emulated blocks, 8 ranks) and
`real-steps` (2 ranks); `smallest` and `smallest-steps` check that the benchmark works.

Ranks are processes in network namespaces of their own with capped links (see `rank_processes`) and use gloo; this needs
root. With --no-namespaces, ranks and network are those of the launcher, with NCCL on CUDA.

Attention blocks are real if there are enough cores for the ranks, or emulated: an emulated block sleeps for a given
time while the real bytes are sent, so 8 ranks reproduce a cluster's proportions on few cores (see `network_calls`).
Everything but the block's arithmetic is the package's own code. The mode `none` computes the same blocks without
transfers. The order of modes changes from repetition to repetition. Times are medians, those of the slowest rank.
`predicted` is the planner's cost model, given the time of a block in mode `none` and the speed of the link, which is
measured first with all ranks sending at once.

Each timed call is checked: the bytes sent equal the formulas; real blocks give the same results with every strategy;
all strategies compute the same number of emulated blocks.

A step is forward, backward, the average of gradients and AdamW of a real model at a small width (see `network_steps`).
Loss and gradient norm of all modes agree in every step. `none` is LV-XAttn without the transfers of cross-attention.
`predicted` adds to a step of `none` what they add to the planner's time of the calls. Ratios are those of steps in the
same repetition, their median. `auto_over_best` compares "auto" with the mode that is fastest by its median; `spread` is
the range of times over their median, for whichever of the two has the larger one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

import harness
import report
import torch
import torch.distributed as dist
from network_calls import SUITES, Link, NetworkBenchmark, Setting
from network_steps import STEP_SUITES, Case, StepBenchmark
from rank_processes import launch, obstacle

from mllm_seqpar.comm import as_communicator


def main() -> None:
    args = parse()
    if args.no_namespaces:
        rank_main(args)
        return
    reason = obstacle()
    if reason:
        raise SystemExit(f"network.py: {reason}")
    for ranks in dict.fromkeys(case.ranks for case in selected(args)):
        options = ["--no-namespaces", "--only-ranks", str(ranks)]
        status = launch(ranks, [sys.executable, os.path.abspath(__file__), *sys.argv[1:], *options])
        if status:
            raise SystemExit(f"network.py: one of {ranks} ranks ended with status {status}; see its output above")


def parse() -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=5)
    parser.add_argument("--suite", nargs="+", default=["smallest"], choices=[*SUITES, *STEP_SUITES], help="see above")
    parser.add_argument("--settings", nargs="+", help="measure only these settings of the suite")
    parser.add_argument("--ranks", type=int, help="number of ranks, instead of the suite's own; not of steps")
    parser.add_argument("--no-namespaces", action="store_true", help="use the ranks and the network of the launcher")
    parser.add_argument("--only-ranks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.no_namespaces:
        args.device = "cpu"
    elif "RANK" not in os.environ:
        parser.error("--no-namespaces: start the ranks with torchrun")
    elif args.only_ranks is None:
        args.ranks = int(os.environ["WORLD_SIZE"])
    if not selected(args):
        names = ", ".join(case.name for case in every(args))
        parser.error(f"--settings: no such setting in suite {' '.join(args.suite)}; choose from {names}")
    if args.device == "cuda" and any(isinstance(case, Case) or case.block_s for case in selected(args)):
        parser.error("--suite: emulated blocks and steps need --device cpu; on CUDA use --suite full")
    return args


def every(args: argparse.Namespace) -> list[Setting | Case]:
    return [
        case
        for name in args.suite
        for case in (STEP_SUITES[name]() if name in STEP_SUITES else SUITES[name](args.ranks))
    ]


def selected(args: argparse.Namespace) -> list[Setting | Case]:
    return [case for case in every(args) if not args.settings or case.name in args.settings]


def rank_main(args: argparse.Namespace) -> None:
    """Measure, as one rank, all settings that have this number of ranks."""
    device = torch.device("cpu")
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    logging.getLogger("mllm_seqpar").setLevel(logging.ERROR)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    comm, link = as_communicator(None), Link()
    for case in selected(args):
        if args.only_ranks not in (None, case.ranks):
            continue
        bench = StepBenchmark(case, comm) if isinstance(case, Case) else NetworkBenchmark(case, comm, device)
        rows = bench.run(args.repeats, link)
        if comm.rank == 0:
            print(summary(rows), flush=True)
            harness.record(args, rows)
    harness.synchronize(device)
    comm.gather_ints([0])  # a rank that exits early closes its connections while other ranks still use them
    dist.destroy_process_group()


def summary(rows: list[dict[str, Any]]) -> str:
    """Return tables of the modes and, if all were measured, of what the setting compares."""
    lines = harness.as_text(rows)
    parts = ["", report.setting_table(lines)]
    if rows[0]["benchmark"] == "end_to_end":
        parts.append(report.step_table([lines]))
    elif len(rows) > 1 and all(row["mode"].startswith("tile") for row in rows[1:]):
        parts.append(report.mesh_table([lines[1:]]))
    elif {"lv-xattn", "ring", "ring, expanded"} <= {row["mode"] for row in rows}:
        parts.append(report.ratio_table([lines]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
