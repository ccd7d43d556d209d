"""Time cross-attention, or whole training steps, over links of a given speed, with every strategy in the same run.

    python scripts/bench/network.py --suite paper|tiles|real [--settings a30-owl3 ...] [--repeats 5] [--out rows.jsonl]
    python scripts/bench/network.py --suite steps real-steps [--settings a100-owl3 ...] [--repeats 3] [--out rows.jsonl]
    torchrun --nproc-per-node 8 scripts/bench/network.py --suite full [--out rows.jsonl]

Suites: `paper` (the proportions of the paper's clusters, emulated blocks, 8 ranks), `tiles` (all mesh shapes on both
sides of the crossover, emulated blocks, 4 to 8 ranks), `real` (as `paper`, with real blocks, 2 ranks), `full` (the
paper's unscaled lengths, on the GPUs of a launcher); whole training steps in `steps` (emulated blocks, 8 ranks) and
`real-steps` (2 ranks).

Ranks are processes in network namespaces of their own with capped links (see `namespaces`) and use gloo; this needs
root. Under torchrun, ranks and network are those of the launcher, with NCCL on CUDA.

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
from collections.abc import Iterator
from typing import Any

import harness
import report
from network_calls import SUITES, CallBenchmark, Setting
from network_steps import STEP_SUITES, StepBenchmark

from mllm_seqpar.comm import as_communicator
from namespaces import Network, network, obstacle


def main() -> None:
    harness.run(parse(), rows_of, report.network_tables)


def parse() -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=5)
    parser.add_argument("--suite", nargs="+", required=True, choices=[*SUITES, *STEP_SUITES], help="see above")
    parser.add_argument("--settings", nargs="+", help="measure only these settings of the suite")
    args = parser.parse_args()
    if not selected(args):
        names = ", ".join(setting.name for setting in every(args))
        parser.error(f"--settings: no such setting in suite {' '.join(args.suite)}; choose from {names}")
    if args.device == "cuda" and any(setting.model or setting.block_s for setting in selected(args)):
        parser.error("--suite: emulated blocks and steps need --device cpu; on CUDA use --suite full")
    return args


def every(args: argparse.Namespace) -> list[Setting]:
    return [setting for name in args.suite for setting in (SUITES | STEP_SUITES)[name]()]


def selected(args: argparse.Namespace) -> list[Setting]:
    return [setting for setting in every(args) if not args.settings or setting.name in args.settings]


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.device == "cuda" or "RANK" in os.environ:
        for setting in selected(args):
            yield from harness.run_on_ranks(setting.ranks, args, measured, setting, None)[0]
        return
    reason = obstacle()
    if reason:
        raise SystemExit(f"network.py: {reason}")
    for setting in selected(args):
        with network(setting.ranks) as links:
            yield from harness.run_on_ranks(setting.ranks, args, measured, setting, links, links=links)[0]


def measured(args: argparse.Namespace, setting: Setting, links: Network | None) -> list[dict[str, Any]]:
    logging.getLogger("mllm_seqpar").setLevel(logging.ERROR)
    benchmark = StepBenchmark if setting.model else CallBenchmark
    return benchmark(setting, as_communicator(None)).run(args.repeats, links)


if __name__ == "__main__":
    main()
