"""Checks the planner against the LV-XAttn paper's tables 3 and 4 (arXiv 2502.02406): seconds in cross-attention.

    python scripts/bench/paper_tables.py [--json rows.jsonl] [--fitted 0|1|2]

Per cluster, effective rates are fitted on a third of the rows (one row of each model), and the other rows predicted by
the simulator that plans for users. Fitted are, per cluster: the rate of attention by head dim (each is another kernel)
and a fixed cost per block; per cluster and family of models: the speed of the network and the share of computation that
transfers run beside. Forward and backward are given as one time, so they have one rate. The paper's ring moves K and V
expanded to all query heads; LV-XAttn there has our schedule's bytes but for the n-th hop.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median

import numpy as np

from mllm_seqpar.planner import Cluster, ParallelSpec, call_cost, read_cluster
from mllm_seqpar.planner.files import CONFIGS
from mllm_seqpar.planner.model import ModelSizes, read_model
from mllm_seqpar.schedules.bytes_sent import Problem, expanded

TABLES = Path(__file__).parent / "paper"
CLUSTERS = {"table3": "a100-80g-4x4", "table4": "a30-24g-8x1"}
GPUS = {"table3": 16, "table4": 8}
NOMINAL = {"a100-80g-4x4": 25e9, "a30-24g-8x1": 1.25e9}
"""Bytes/s between nodes as the paper gives them."""
Rates = dict[str, float]


@dataclass(frozen=True)
class PaperRow:
    """One row of a table: a model, lengths of text and keys, and the paper's seconds by strategy."""

    model: ModelSizes
    rows: int
    keys: int
    seconds: dict[str, float] = field(hash=False)

    @property
    def family(self) -> str:
        """Of models: "mplug-owl3", "open-flamingo"."""
        return self.model.name.rpartition("-")[0]

    @property
    def name(self) -> str:
        """Model, text tokens, visual keys."""
        return f"{self.model.name} {self.rows}/{self.keys}"


def read_table(name: str) -> list[PaperRow]:
    """The rows of "table3" or "table4"."""
    lines = [line for line in (TABLES / f"{name}.csv").read_text().splitlines() if not line.startswith("#")]
    found = []
    for row in csv.DictReader(lines):
        model = read_model(CONFIGS / "models" / f"{_MODELS[row['model']]}.yaml")
        seconds = {"ring": float(row["ca_ring_s"]), "lv-xattn": float(row["ca_lvxattn_s"])}
        found.append(PaperRow(model, int(row["s_q"]), int(row["s_kv"]), seconds))
    return found


_MODELS = {
    "mPLUG-Owl3-7b": "mplug-owl3-7b",
    "mPLUG-Owl3-2b": "mplug-owl3-2b",
    "mPLUG-Owl3-1b": "mplug-owl3-1b",
    "OpenFlamingo-9b": "open-flamingo-9b",
    "OpenFlamingo-3b": "open-flamingo-3b",
}


def predicted(row: PaperRow, cluster: Cluster, gpus: int, rates: Rates) -> dict[str, float]:
    """Seconds in cross-attention, forward and backward, of all layers, by strategy, at fitted rates."""
    return {name: _seconds(row, name, cluster, gpus, *_rates_of(row, rates)) for name in row.seconds}


def _rates_of(row: PaperRow, rates: Rates) -> tuple[float, float, float, float]:
    """Those of the rates that a row's model is subject to."""
    attention = rates[f"attention, heads of {row.model.cross.head_dim}"]
    return attention, rates[f"network, {row.family}"], rates["block"], rates[f"overlap, {row.family}"]


@lru_cache(maxsize=100_000)
def _seconds(
    row: PaperRow,
    strategy: str,
    cluster: Cluster,
    gpus: int,
    attention: float,
    network: float,
    block: float,
    overlap: float,
) -> float:
    cluster = replace(
        cluster,
        attention_forward=attention,
        attention_backward=attention,
        network_link=network,
        block_overhead_s=block,
        overlap=overlap,
    )
    cross = row.model.cross
    problem = Problem(
        rows=row.rows // gpus,
        keys=(row.keys // gpus,) * gpus,
        heads=cross.heads,
        kv_heads=cross.kv_heads,
        dim=cross.head_dim,
    )
    way = ParallelSpec("lv-xattn", (gpus, 1))
    if strategy == "ring":  # expanded to all query heads; dK and dV in the model's dtype
        way, problem = ParallelSpec("ring", (1, gpus)), replace(expanded(problem), accumulated=problem.element)
    return cross.layers * sum(call_cost(problem, way, cluster, backward=b).seconds for b in (False, True))


def fit(rows: Sequence[PaperRow], cluster: Cluster, gpus: int) -> Rates:
    """The rates that make the mean square of log(predicted / paper) least (Levenberg and Marquardt's method).

    The network may be at most a seventh faster than it is said to be. Searched from a slow and from a fast one: where
    all transfers are hidden, their speed makes no difference.
    """
    ceiling = {f"overlap, {row.family}": 1.0 for row in rows}
    ceiling |= {f"network, {row.family}": 1.15 * cluster.network_link for row in rows}

    def errors(trial: Rates) -> np.ndarray:
        found = [(predicted(row, cluster, gpus, trial), row.seconds) for row in rows]
        return np.array([math.log(ours[name] / theirs[name]) for ours, theirs in found for name in theirs])

    starts: list[Rates] = [
        {"block": 1e-3}
        | {f"attention, heads of {row.model.cross.head_dim}": 0.05 * (cluster.peak_flops or 1e14) for row in rows}
        | {f"network, {row.family}": share * cluster.network_link for row in rows}
        | {f"overlap, {row.family}": 0.6 for row in rows}
        for share in (0.15, 1.0)
    ]
    return min((_search(start, ceiling, errors) for start in starts), key=lambda rates: _square(errors(rates)))


def _search(rates: Rates, ceiling: Rates, errors: Callable[[Rates], np.ndarray], rounds: int = 25) -> Rates:
    """All rates are searched by their logarithms."""
    names, damping, nudge = list(rates), 0.1, 1e-3
    now = errors(rates)
    for _ in range(rounds):
        nudged = [errors(rates | {name: rates[name] * math.exp(-nudge)}) for name in names]
        slopes = np.stack([(now - other) / nudge for other in nudged], axis=1)
        square, before = slopes.T @ slopes, _square(now)
        for _ in range(6):
            damped = square + damping * (np.diag(np.diag(square)) + 1e-6 * np.eye(len(names)))
            step = np.clip(np.linalg.solve(damped, -slopes.T @ now), -1.0, 1.0)
            trial = {
                name: min(rates[name] * math.exp(move), ceiling.get(name, math.inf))
                for name, move in zip(names, step, strict=True)
            }
            found = errors(trial)
            if _square(found) < before:
                rates, now, damping = trial, found, damping / 3
                break
            damping *= 4
        if _square(now) > before * (1 - 1e-4):
            break
    return rates


def _square(errors: np.ndarray) -> float:
    return float((errors**2).sum())


@dataclass(frozen=True)
class Result:
    """One table, fitted and predicted. `errors`: predicted / paper - 1 of the rows that were not fitted, by name."""

    table: str
    rates: Rates
    found: dict[str, dict[str, float]]
    errors: dict[tuple[str, str], float]
    order_right: bool

    @property
    def median(self) -> float:
        """Of the errors' sizes."""
        return median(map(abs, self.errors.values()))


def check(table: str, third: int = 1) -> Result:
    """Fits the rows `third` of each model (0: the longest, 1: half the frames, 2: half of both), predicts all."""
    rows, gpus = read_table(table), GPUS[table]
    cluster = read_cluster(CONFIGS / "clusters" / f"{CLUSTERS[table]}.yaml")
    fitted = rows[third::3]
    rates = fit(fitted, cluster, gpus)
    found = {row.name: predicted(row, cluster, gpus, rates) for row in rows}
    errors = {
        (row.name, name): found[row.name][name] / row.seconds[name] - 1
        for row in rows
        if row not in fitted
        for name in row.seconds
    }
    order = [_order(found[row.name]) == _order(row.seconds) for row in rows]
    return Result(table, rates, found, errors, all(order))


def _order(seconds: dict[str, float]) -> list[str]:
    return sorted(seconds, key=seconds.__getitem__)


def main() -> None:
    """Fit, predict and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fitted", type=int, choices=[0, 1, 2], default=1, help="which row of each model is fitted")
    parser.add_argument("--json", help="append one JSON row per figure to this file")
    args = parser.parse_args()
    for table in CLUSTERS:
        result = check(table, args.fitted)
        _print(result)
        if args.json:
            _write(result, args.json)


def _print(result: Result) -> None:
    cluster = read_cluster(CONFIGS / "clusters" / f"{CLUSTERS[result.table]}.yaml")
    print(f"\n{result.table}: {GPUS[result.table]} GPUs, {cluster.name}. Fitted rates, beside what they are rates of:")
    for name, value in sorted(result.rates.items()):
        print(f"  {name:<28}{_told(name, value, cluster)}")
    print(f"{'row (text/keys)':>32} {'':>9} {'paper s':>9} {'planner s':>10} {'error':>7}")
    for row in read_table(result.table):
        for strategy, paper in row.seconds.items():
            ours = result.found[row.name][strategy]
            mark = "" if (row.name, strategy) in result.errors else "  fitted"
            print(f"{row.name:>32} {strategy:>9} {paper:9.2f} {ours:10.2f} {ours / paper - 1:+7.1%}{mark}")
    worst = max(result.errors, key=lambda key: abs(result.errors[key]))
    order = "right in every row" if result.order_right else "WRONG in some row"
    print(f"rows that were not fitted: median error {result.median:.1%}, worst {result.errors[worst]:+.1%} ", end="")
    print(f"({worst[0]}, {worst[1]}); order of strategies {order}")


def _told(name: str, value: float, cluster: Cluster) -> str:
    if name.startswith("attention"):
        peak = cluster.peak_flops or math.nan
        return f"{value / 1e12:7.2f} TFLOP/s, {value / peak:.1%} of the {peak / 1e12:.0f} of the processor"
    if name.startswith("network"):
        return (
            f"{value / 1e9:7.2f} GB/s, {value / NOMINAL[cluster.name]:.0%} of the link's {NOMINAL[cluster.name] / 1e9}"
        )
    if name == "block":
        return f"{value * 1e3:7.2f} ms for each block, whatever its size"
    return f"{value:7.2f} of computation runs beside transfers"


def _write(result: Result, path: str) -> None:
    with open(path, "a") as file:
        for row in read_table(result.table):
            for strategy, paper in row.seconds.items():
                figures = {"table": result.table, "row": row.name, "strategy": strategy, "paper_s": paper}
                figures |= {"planner_s": result.found[row.name][strategy]}
                figures |= {"fitted": (row.name, strategy) not in result.errors}
                file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
