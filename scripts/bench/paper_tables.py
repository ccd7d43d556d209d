"""Check the planner against the LV-XAttn paper's tables 3 and 4 (arXiv 2502.02406): seconds in cross-attention.

    python scripts/bench/paper_tables.py [--out rows.jsonl] [--fitted 0|1|2]

For each cluster, effective rates are fitted to a third of the rows (one row of each model), and the planner's simulator
predicts the other rows. Fitted per cluster: the rate of attention for each head dim (each has its own kernel) and a
fixed cost per block. Fitted per cluster and model family: the speed of the network, and the fraction of computation
that overlaps with transfers. The paper reports forward and backward as one time, so both have the same rate. Its Ring
Attention sends K and V expanded to all query heads; its LV-XAttn sends our schedule's bytes except for the n-th hop.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median

import harness
import numpy as np
import report

from mllm_seqpar.planner import AttentionCall, Cluster, ParallelSpec, read_cluster
from mllm_seqpar.planner.descriptions import CONFIGS
from mllm_seqpar.planner.model_sizes import ModelSizes, read_model
from mllm_seqpar.schedules.bytes_sent import Problem, expanded

TABLES = Path(__file__).parent / "paper"
CLUSTERS = {"table3": "a100-80g-4x4", "table4": "a30-24g-8x1"}
GPUS = {"table3": 16, "table4": 8}
NOMINAL = {"a100-80g-4x4": 25e9, "a30-24g-8x1": 1.25e9}
"""Bytes/s between nodes according to the paper."""
Rates = dict[str, float]


@dataclass(frozen=True)
class PaperRow:
    table: str
    label: str  # the paper's name of the model
    model: ModelSizes
    rows: int  # text tokens
    keys: int  # visual keys
    seconds: dict[str, float] = field(hash=False)  # in cross-attention, by strategy
    step_seconds: dict[str, float] = field(hash=False)  # of a whole step

    @property
    def family(self) -> str:
        """The model's name without its size, such as "mplug-owl3"."""
        return self.model.name.rpartition("-")[0]

    @property
    def heads(self) -> dict[str, int]:
        cross = self.model.cross
        return {"heads": cross.heads, "kv_heads": cross.kv_heads, "dim": cross.head_dim}

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.rows}/{self.keys}"


def read_table(name: str) -> list[PaperRow]:
    lines = [line for line in (TABLES / f"{name}.csv").read_text().splitlines() if not line.startswith("#")]
    found = []
    for row in csv.DictReader(lines):
        file = row["model"].lower().replace("openflamingo", "open-flamingo")
        model = read_model(CONFIGS / "models" / f"{file}.yaml")
        seconds = {"ring": float(row["ca_ring_s"]), "lv-xattn": float(row["ca_lvxattn_s"])}
        steps = {"ring": float(row["total_ring_s"]), "lv-xattn": float(row["total_lvxattn_s"])}
        found.append(PaperRow(name, row["model"], model, int(row["s_q"]), int(row["s_kv"]), seconds, steps))
    return found


def predicted(row: PaperRow, cluster: Cluster, gpus: int, rates: Rates) -> dict[str, float]:
    """Return the seconds in cross-attention (forward and backward, all layers) by strategy, at fitted rates."""
    attention = rates[f"attention, heads of {row.model.cross.head_dim}"]
    fitted = {"attention_forward": attention, "attention_backward": attention, "block_overhead_s": rates["block"]}
    fitted |= {"network_link": rates[f"network, {row.family}"], "overlap": rates[f"overlap, {row.family}"]}
    of_row = replace(cluster, **fitted)
    return {strategy: _seconds(row, strategy, of_row, gpus) for strategy in row.seconds}


@lru_cache(maxsize=100_000)
def _seconds(row: PaperRow, strategy: str, cluster: Cluster, gpus: int) -> float:
    cross, rows, keys = row.model.cross, row.rows // gpus, (row.keys // gpus,) * gpus
    problem = Problem(rows=rows, keys=keys, **row.heads)
    spec = ParallelSpec("lv-xattn", (gpus, 1))
    if strategy == "ring":  # K, V expanded to all query heads; dK, dV in the model's dtype
        spec, problem = ParallelSpec("ring", (1, gpus)), replace(expanded(problem), accumulated=problem.element)
    return cross.layers * sum(AttentionCall(problem, spec, cluster, backward=b).cost.seconds for b in (False, True))


def fit(rows: Sequence[PaperRow], cluster: Cluster, gpus: int) -> Rates:
    """Return the rates that minimise the mean square of log(predicted / paper) (Levenberg-Marquardt).

    The network may be at most 15% faster than its nominal speed. The search starts from a slow and from a fast network:
    if all transfers are overlapped, the error does not depend on their speed.
    """
    limits = {f"overlap, {row.family}": 1.0 for row in rows}
    limits |= {f"network, {row.family}": 1.15 * cluster.network_link for row in rows}

    def errors(trial: Rates) -> np.ndarray:
        found = [(predicted(row, cluster, gpus, trial), row.seconds) for row in rows]
        return np.array([math.log(ours[name] / paper[name]) for ours, paper in found for name in paper])

    starts: list[Rates] = [
        {"block": 1e-3}
        | {f"attention, heads of {row.model.cross.head_dim}": 0.05 * (cluster.peak_flops or 1e14) for row in rows}
        | {f"network, {row.family}": fraction * cluster.network_link for row in rows}
        | {f"overlap, {row.family}": 0.6 for row in rows}
        for fraction in (0.15, 1.0)
    ]
    return min((_search(start, limits, errors) for start in starts), key=lambda rates: _square(errors(rates)))


def _search(rates: Rates, limits: Rates, errors: Callable[[Rates], np.ndarray], rounds: int = 25) -> Rates:
    """Search over the logarithms of all rates."""
    damping, difference = 0.1, 1e-3
    now = errors(rates)
    for _ in range(rounds):
        shifted = [errors(rates | {name: rate * math.exp(-difference)}) for name, rate in rates.items()]
        slopes = np.stack([(now - other) / difference for other in shifted], axis=1)
        square, before = slopes.T @ slopes, _square(now)
        for _ in range(6):
            damped = square + damping * (np.diag(np.diag(square)) + 1e-6 * np.eye(len(rates)))
            factors = np.exp(np.clip(np.linalg.solve(damped, -slopes.T @ now), -1.0, 1.0)).tolist()
            moved = {name: rate * factor for (name, rate), factor in zip(rates.items(), factors, strict=True)}
            trial = {name: min(rate, limits.get(name, math.inf)) for name, rate in moved.items()}
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
    table: str
    rates: Rates  # as fitted
    found: dict[str, dict[str, float]]  # predicted seconds by row name and strategy
    errors: dict[tuple[str, str], float]  # predicted / paper - 1 of the rows that were not fitted
    order_right: bool  # whether the faster strategy is predicted correctly in every row

    @property
    def median(self) -> float:
        return median(map(abs, self.errors.values()))


def check(table: str, third: int = 1) -> Result:
    """Fit one row of each model (0: the longest, 1: half the frames, 2: half of text and frames); predict all rows."""
    rows, gpus = read_table(table), GPUS[table]
    cluster = _cluster(table)
    fitted = rows[third::3]
    rates = fit(fitted, cluster, gpus)
    found = {row.name: predicted(row, cluster, gpus, rates) for row in rows}
    errors = {
        (row.name, name): found[row.name][name] / paper - 1
        for row in rows
        if row not in fitted
        for name, paper in row.seconds.items()
    }
    fastest = [(min(times, key=times.__getitem__) for times in (found[row.name], row.seconds)) for row in rows]
    return Result(table, rates, found, errors, all(ours == paper for ours, paper in fastest))


def _cluster(table: str) -> Cluster:
    return read_cluster(CONFIGS / "clusters" / f"{CLUSTERS[table]}.yaml")


def main() -> None:
    parser = harness.options(__doc__, device=False)
    parser.add_argument("--fitted", type=int, choices=[0, 1, 2], default=1, help="the row of each model that is fitted")
    harness.run(parser.parse_args(), rows_of, table)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Print what was fitted for each table and how well it predicts; yield the figures, one row each."""
    for name in CLUSTERS:
        result, cluster = check(name, args.fitted), _cluster(name)
        print(f"{name}: {GPUS[name]} GPUs, {cluster.name}. Fitted rates:")
        for rate, value in sorted(result.rates.items()):
            print(f"  {rate:<28}{_describe(rate, value, cluster)}")
        worst = max(result.errors, key=lambda key: abs(result.errors[key]))
        order = "right in every row" if result.order_right else "WRONG in some row"
        print(
            f"rows that were not fitted: median error {result.median:.1%}, worst {result.errors[worst]:+.1%} ", end=""
        )
        print(f"({worst[0]}, {worst[1]}); order of strategies {order}")
        for row in read_table(name):
            for strategy, paper in row.seconds.items():
                ours, fitted = result.found[row.name][strategy], (row.name, strategy) not in result.errors
                figures = {"table": name, "row": row.name, "strategy": strategy, "paper_s": paper, "planner_s": ours}
                yield figures | {"error": ours / paper - 1, "fitted": fitted}


def table(rows: Sequence[harness.Row]) -> str:
    columns = {"table": "table", "row (text/keys)": "row", "strategy": "strategy", "paper, s": "paper_s .2f"}
    columns |= {"planner, s": "planner_s .2f", "error": "error +.1%", "fitted": "fitted"}
    return report.table(rows, columns)


def _describe(name: str, value: float, cluster: Cluster) -> str:
    if name.startswith("attention"):
        peak = cluster.peak_flops or math.nan
        return f"{value / 1e12:7.2f} TFLOP/s, {value / peak:.1%} of the processor's {peak / 1e12:.0f}"
    if name.startswith("network"):
        nominal = NOMINAL[cluster.name]
        return f"{value / 1e9:7.2f} GB/s, {value / nominal:.0%} of the link's {nominal / 1e9}"
    if name == "block":
        return f"{value * 1e3:7.2f} ms per block, independent of its size"
    return f"{value:7.2f} of the computation overlaps with transfers"


if __name__ == "__main__":
    main()
