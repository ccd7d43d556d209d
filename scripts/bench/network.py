"""Time forward and backward of cross-attention over links of a given speed, with every strategy in the same run.

    python scripts/bench/network.py --suite paper|tiles|real [--ranks 8] [--repeats 5] [--out rows.csv]
    torchrun --nproc-per-node 8 scripts/bench/network.py --suite full --no-namespaces [--out rows.csv]

Ranks are processes in network namespaces of their own with capped links (see `namespaces`) and use gloo; this needs
root. With --no-namespaces, ranks and network are those of the launcher, with NCCL on CUDA.

Attention blocks are real if there are enough cores for the ranks, or emulated: an emulated block sleeps for a given
time while the real bytes are sent, so 8 ranks reproduce a cluster's proportions on few cores (see `network_settings`).
Everything but the block's arithmetic is the package's own code. Each timed run is checked: the bytes sent equal the
formulas; real blocks give the same results with every strategy; all strategies compute the same number of emulated
blocks. The mode `none` computes the same blocks without transfers. The order of modes changes from repetition to
repetition. Times are medians, those of the slowest rank. `predicted` is the planner's cost model, given the time of a
block in mode `none` and the speed of the link, which is measured first with all ranks sending at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from statistics import median
from typing import Any

import report
import torch
import torch.distributed as dist
from measure import environment, synchronize
from namespaces import launch, obstacle
from network_modes import Speed
from network_run import Link, Measured, NetworkBenchmark
from network_settings import SUITES, Setting, suite
from paper_tables import GPUS
from rows import append, as_text, digits

from mllm_seqpar.comm import as_communicator


def main() -> None:
    args = parse()
    if args.no_namespaces:
        rank_main(args)
        return
    reason = obstacle()
    if reason:
        raise SystemExit(f"network.py: {reason}")
    for ranks in sorted({setting.ranks for setting in selected(args)}):
        options = ["--no-namespaces", "--only-ranks", str(ranks)]
        status = launch(ranks, [sys.executable, os.path.abspath(__file__), *sys.argv[1:], *options])
        if status:
            raise SystemExit(f"network.py: one of {ranks} ranks ended with status {status}; see its output above")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = "; ".join(f"{name}: {what}" for name, what in SUITES.items())
    parser.add_argument("--suite", default="smallest", choices=list(SUITES), help=suites)
    parser.add_argument("--settings", nargs="+", help="measure only these settings of the suite")
    parser.add_argument("--modes", nargs="+", help="measure only these modes, and none")
    parser.add_argument("--ranks", type=int, help="number of ranks, instead of the suite's own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of modes")
    parser.add_argument("--out", help="append a row per setting and mode to this CSV file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
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
        names = ", ".join(setting.name for setting in suite(args.suite, args.ranks))
        parser.error(f"--settings: no such setting in suite {args.suite}; choose from {names}")
    if args.device == "cuda" and any(setting.block_s for setting in selected(args)):
        parser.error(f"--suite {args.suite}: emulated blocks need --device cpu; on CUDA use --suite full")
    return args


def selected(args: argparse.Namespace) -> list[Setting]:
    return [s for s in suite(args.suite, args.ranks) if not args.settings or s.name in args.settings]


def rank_main(args: argparse.Namespace) -> None:
    """Measure, as one rank, all settings that have this number of ranks."""
    device = torch.device("cpu")
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    comm, link = as_communicator(None), Link()
    machine = environment(args.device)
    for setting in selected(args):
        if args.only_ranks not in (None, setting.ranks):
            continue
        found = NetworkBenchmark(setting, comm, device).run(args.repeats, args.seed, link, args.modes)
        if comm.rank == 0:
            rows = rows_of(setting, found)
            print(summary(setting, rows), flush=True)
            if args.out:
                append(args.out, [digits(row | machine) for row in rows])
    synchronize(device)
    comm.gather_ints([0])  # a rank that exits early closes its connections while other ranks still use them
    dist.destroy_process_group()


def columns_of(setting: Setting, block_s: float, mbit: float | None, speed: Speed | None) -> dict[str, Any]:
    """Return the columns that all modes of a setting share."""
    shape = {name: getattr(setting, name) for name in ("ranks", "rows", "keys", "heads", "kv_heads", "dim", "dtype")}
    common = {"setting": setting.name, "blocks": "emulated" if setting.block_s else "real"}
    common |= shape | {"block_ms": block_s * 1e3, "cap_mbit": mbit or "", "link_mbit": "", "latency_ms": ""}
    if speed is not None:
        common |= {"link_mbit": speed[0] * 8e-6, "latency_ms": speed[1] * 1e3}
    if (paper := setting.paper) is not None:
        common |= {"paper_cluster": {"table3": "A100", "table4": "A30"}[paper.table], "paper_model": paper.label}
        common |= {"paper_gpus": GPUS[paper.table], "paper_rows": paper.rows, "paper_keys": paper.keys}
        common |= {"paper_ring_s": paper.seconds["ring"], "paper_lv_xattn_s": paper.seconds["lv-xattn"]}
    return common


def rows_of(setting: Setting, found: Measured) -> list[dict[str, Any]]:
    common = {"benchmark": "network"} | columns_of(setting, found.block_s, found.mbit, found.speed)
    without = next(times for mode, times in found.times.items() if mode.spec is None)
    none, forward = median(without.total), median(without.forward)
    block = forward / setting.ranks, (none - forward) / setting.ranks
    rows = []
    for mode, times in found.times.items():
        tile = "" if mode.spec is None else "{}x{}".format(*mode.spec.mesh_shape)
        row = common | {"mode": mode.name, "tile": tile, "overlap": mode.overlap, "repeats": len(times.total)}
        row |= {"seconds": median(times.total), "least_s": min(times.total), "most_s": max(times.total)}
        row |= {"forward_s": median(times.forward), "over_none": median(times.total) / none, "sent_bytes": times.sent}
        rows.append(row | {"predicted_s": mode.predicted_s(setting, block, found.speed)})
    return rows


def summary(setting: Setting, rows: list[dict[str, Any]]) -> str:
    """Return tables of the modes and, if all were measured, of what the setting compares."""
    lines = as_text(rows)
    parts = ["", report.setting_table(lines)]
    if setting.only_mesh_shapes:
        parts.append(report.mesh_table([lines[1:]]))
    elif {"lv-xattn", "ring", "ring, expanded"} <= {row["mode"] for row in rows}:
        parts.append(report.ratio_table([lines]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
