"""Plan how each strategy scales: cross-attention of a training step for growing numbers of GPUs and lengths of video.

    python scripts/bench/scale.py --model mplug-owl3-7b --text 8192 --cluster a100-80g-8xN
        [--gpus 8 16 64 256 1024] [--minutes 10 60 240 1440] [--out rows.jsonl]

The video has one frame per second. The first Markdown table has the seconds of cross-attention in a training step
(forward and backward, all layers, with the projections of K and V) and, in brackets, the percentage of that time in
which the slowest GPU waits. "-" means that the step does not fit in memory. The choice of strategy="auto" is bold. The
whole step uses that choice and the fastest self-attention. The second table has the longest video that fits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import harness
import report
from harness import Row

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import read_cluster
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.plan import Plan, StrategyPlan, make_plan
from mllm_seqpar.planner.workload import SELF_ATTENTION, Workload
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES


def main() -> None:
    parser = harness.options(__doc__, device=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=int, required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--gpus", type=int, nargs="*", default=[8, 16, 64, 256, 1024])
    parser.add_argument("--minutes", type=int, nargs="*", default=[10, 60, 240, 1440])
    harness.run(parser.parse_args(), rows_of, tables)


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    model, cluster = read_model(args.model), read_cluster(args.cluster)
    for minutes in args.minutes:
        for gpus in args.gpus:
            plan = make_plan(Workload(model=model, frames=60 * minutes, text=args.text, gpus=gpus), cluster)
            rows = {row.spec.strategy: row for row in reversed(plan.rows)}
            cells = {name: _cell(plan, rows.get(name)) for name in STRATEGIES}
            longest = {f"longest_{name}": _longest(rows.get(name)) for name in STRATEGIES}
            yield {"video": _length(minutes), "gpus": str(gpus), **cells, "whole_step": _whole_step(plan), **longest}


def tables(rows: Sequence[Row]) -> str:
    columns = {"video": "video", "GPUs": "gpus", **{name: name for name in STRATEGIES}, "whole step": "whole_step"}
    longest = {"GPUs": "gpus", **{name: f"longest_{name}" for name in STRATEGIES}}
    first = [row for row in rows if row["video"] == rows[0]["video"]]  # the same for all lengths
    return f"{report.table(rows, columns)}\n\nLongest video that fits\n\n{report.table(first, longest)}"


def _cell(plan: Plan, row: StrategyPlan | None) -> str:
    if row is None:
        return "not legal"
    if not row.fits:
        return "-"
    cross = row.parts["cross-attention"]
    a, b = row.spec.mesh_shape
    shape = {
        "mesh": f" {a}x{b}",
        "ulysses": f" {row.spec.head_degree}" + (f" x {a}x{b}" if a * b > 1 else ""),
    }.get(row.spec.strategy, "")
    text = f"{_seconds(cross.seconds)} ({cross.exposed / cross.seconds:.0%}){shape}"
    return f"**{text}**" if row is _selected(plan) else text


def _selected(plan: Plan) -> StrategyPlan | None:
    """Return the first row, in the order of STRATEGIES, within 2% of the fastest that fits, as the planner selects."""
    fitting = [(row, row.parts["cross-attention"].seconds) for row in plan.rows if row.fits]
    limit = 1.02 * min((seconds for _, seconds in fitting), default=0.0)
    near = [row for row, seconds in fitting if seconds <= limit]
    return min(near, key=lambda row: STRATEGIES.index(row.spec.strategy), default=None)


def _whole_step(plan: Plan) -> str:
    selected = _selected(plan)
    if selected is None:
        return "-"
    seconds = {}
    for kind in (name for name in SELF_ATTENTION if name != "auto"):
        with suppress(ConfigError):  # raised if this self-attention is not legal on so many GPUs
            run = replace(plan.workload, self_attention=kind)
            row = make_plan(run, plan.cluster, (selected.spec.strategy,)).best
            if row.fits:
                seconds[kind] = row.seconds
    kind = min(seconds, key=seconds.__getitem__)
    return f"{_seconds(seconds[kind])}, self {kind}"


def _longest(row: StrategyPlan | None) -> str:
    if row is None:
        return "not legal"
    return _length(row.max_frames / 60) if row.max_frames else "none"


def _length(minutes: float) -> str:
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 72 * 60 else f"{minutes / 1440:.0f} days"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"
    return f"{value * 1e3:.3g} ms"


if __name__ == "__main__":
    main()
