"""Times forward + backward of cross-attention over links of a set speed: every strategy, in the same runs.

    python scripts/bench/network.py --suite paper|tiles|real [--ranks 8] [--repeats 5] [--out rows.csv]
    torchrun --nproc-per-node 8 scripts/bench/network.py --suite full --no-namespaces [--out rows.csv]

Ranks are processes in network namespaces of their own with capped links (`namespaces`), gloo between them; that needs
root. With --no-namespaces they are those of the launcher, with its network: NCCL where there is CUDA.

Blocks are real, for as many ranks as cores; or emulated (`emulated`): a block takes a set time off the processor while
the real bytes travel, so that 8 ranks reproduce a cluster's proportions on few cores (`network_settings`). Everything
but the block's arithmetic is the package's own. Every timed run is checked: bytes sent are those of the formulas; real
blocks give the same results by every strategy; emulated ones were as many by every strategy. `none` is the same blocks
without transfers. The order of modes changes from repetition to repetition; times are of the slowest rank, medians.
`predicted` is the planner's cost model, given the time of a block as `none` had it, and the link's speed, measured
before with all ranks sending at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from link import Link, synchronize
from measure import environment
from namespaces import launch, obstacle
from network_measure import Bench, Measured, spread
from network_predict import BlockTime, predicted_s
from network_settings import SUITES, Setting, suite
from rows import append, digits

from mllm_seqpar.comm import as_communicator


def main() -> None:
    """Start ranks in namespaces, or be one."""
    args = parse()
    if args.no_namespaces:
        rank_main(args)
        return
    reason = obstacle()
    if reason:
        raise SystemExit(f"network.py: {reason}")
    for ranks in sorted({setting.ranks for setting in selected(args)}):
        mine = ["--no-namespaces", "--only-ranks", str(ranks)]
        status = launch(ranks, [sys.executable, os.path.abspath(__file__), *sys.argv[1:], *mine])
        if status:
            raise SystemExit(f"network.py: a rank of {ranks} ended with status {status}; what it said stands above")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = "; ".join(f"{name}: {what}" for name, what in SUITES.items())
    parser.add_argument("--suite", default="smallest", choices=list(SUITES), help=told)
    parser.add_argument("--settings", nargs="+", help="only these of the suite, by name")
    parser.add_argument("--modes", nargs="+", help="only these modes, by name, and none")
    parser.add_argument("--ranks", type=int, help="instead of the suite's number; the launcher's with --no-namespaces")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the order of modes")
    parser.add_argument("--out", help="append a row per setting and mode to this CSV file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--no-namespaces", action="store_true", help="ranks and network are the launcher's")
    parser.add_argument("--only-ranks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.no_namespaces:
        args.device = "cpu"
    elif "RANK" not in os.environ:
        parser.error("--no-namespaces: start the ranks with torchrun")
    elif args.only_ranks is None:
        args.ranks = int(os.environ["WORLD_SIZE"])
    if not selected(args):
        parser.error(
            f"--settings: the suite {args.suite} has {', '.join(s.name for s in suite(args.suite, args.ranks))}"
        )
    if args.device == "cuda" and any(setting.block_s for setting in selected(args)):
        parser.error(f"--suite {args.suite}: emulated blocks are for CPUs; on CUDA use --suite full, or --device cpu")
    return args


def selected(args: argparse.Namespace) -> list[Setting]:
    """The settings to measure."""
    return [s for s in suite(args.suite, args.ranks) if not args.settings or s.name in args.settings]


def rank_main(args: argparse.Namespace) -> None:
    """One rank: all settings of this number of ranks."""
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    comm, link = as_communicator(None), Link()
    where = environment(args.device)
    for setting in selected(args):
        if args.only_ranks not in (None, setting.ranks):
            continue
        found = Bench(setting, comm, device).run(args.repeats, args.seed, link, args.modes)
        if comm.rank == 0:
            rows = rows_of(setting, found)
            print(table(setting, found, rows), flush=True)
            if args.out:
                append(args.out, [digits(row | where) for row in rows])
    synchronize(device)
    comm.gather_ints([0])  # a rank that ends early takes its connections with it
    dist.destroy_process_group()


def rows_of(setting: Setting, found: Measured) -> list[dict[str, Any]]:
    """One row per mode."""
    common = {
        "benchmark": "network",
        "setting": setting.name,
        "blocks": "emulated" if setting.block_s else "real",
        "ranks": setting.ranks,
        "rows": setting.rows,
        "keys": setting.keys,
        "heads": setting.heads,
        "kv_heads": setting.kv_heads,
        "dim": setting.dim,
        "dtype": setting.dtype,
        "block_ms": found.block_s * 1e3,
        "cap_mbit": found.mbit or "",
        "link_mbit": found.speed.bytes_per_s * 8e-6 if found.speed else "",
        "latency_ms": found.speed.latency_s * 1e3 if found.speed else "",
    }
    if setting.paper is not None:
        paper = setting.paper
        common |= {"paper_cluster": paper.cluster, "paper_model": paper.model, "paper_gpus": paper.gpus}
        common |= {"paper_rows": paper.rows, "paper_keys": paper.keys}
        common |= {"paper_ring_s": paper.ring_s, "paper_lv_xattn_s": paper.lv_xattn_s}
    alone = next(times for mode, times in found.times.items() if mode.way is None)
    none, forward = spread(alone.total)[0], spread(alone.forward)[0]
    block = BlockTime(forward / setting.ranks, (none - forward) / setting.ranks)
    rows = []
    for mode, times in found.times.items():
        seconds, least, most = spread(times.total)
        rows.append(
            common
            | {
                "mode": mode.name,
                "tile": "" if mode.way is None else "{}x{}".format(*mode.way.mesh_shape),
                "overlap": mode.overlap,
                "repeats": len(times.total),
                "seconds": seconds,
                "least_s": least,
                "most_s": most,
                "forward_s": spread(times.forward)[0],
                "over_none": seconds / none,
                "sent_bytes": times.sent,
                "predicted_s": predicted_s(mode, setting, block, found.speed),
            }
        )
    return rows


def table(setting: Setting, found: Measured, rows: list[dict[str, Any]]) -> str:
    """A setting as text."""
    link = (
        ""
        if found.speed is None
        else (
            f"link {found.speed.bytes_per_s * 8e-6:.0f} Mbit/s"
            + (f" of {found.mbit:.0f}" if found.mbit else "")
            + f", {found.speed.latency_s * 1e3:.2f} ms"
        )
    )
    lines = [
        f"\n{setting.name}: {setting.ranks} ranks of {setting.rows} rows and {setting.keys} keys, "
        f"{setting.heads} heads, {setting.kv_heads} KV heads of {setting.dim}; block {found.block_s * 1e3:.1f} ms "
        f"({'emulated' if setting.block_s else 'real'}); {link}",
        f"{'mode':<20} {'ms':>9} {'least':>9} {'most':>9} {'/none':>7} {'MB sent':>8} {'predicted':>9} {'off':>6}",
    ]
    for row in rows:
        ms = [row[name] * 1e3 for name in ("seconds", "least_s", "most_s", "predicted_s")]
        lines.append(
            f"{row['mode']:<20} {ms[0]:>9.1f} {ms[1]:>9.1f} {ms[2]:>9.1f} {row['over_none']:>7.3f} "
            f"{row['sent_bytes'] / 1e6:>8.2f} {ms[3]:>9.1f} {ms[0] / ms[3] - 1:>+6.1%}"
        )
    return "\n".join(lines + verdicts(setting, rows))


def verdicts(setting: Setting, rows: list[dict[str, Any]]) -> list[str]:
    """What a setting was measured for."""
    if setting.only_tiles:
        tiles = [row for row in rows if row["mode"] != "none"]
        best = min(tiles, key=lambda row: row["predicted_s"])
        place = 1 + sum(row["seconds"] < best["seconds"] for row in tiles)
        return [f"the cost model's best, {best['mode']}, is number {place} of {len(tiles)} measured"]
    of = {row["mode"]: row for row in rows}
    rings = [name for name in ("ring", "ring, expanded") if name in of and "lv-xattn" in of]
    told = []
    for ring in rings:
        ratio, arithmetic = (of[ring][x] / of["lv-xattn"][x] for x in ("seconds", "predicted_s"))
        told.append(f"{ring} / lv-xattn: {ratio:.2f}, by arithmetic {arithmetic:.2f} ({ratio / arithmetic - 1:+.1%})")
    if setting.paper is not None and "ring, expanded" in rings:
        told[-1] += f"; in the paper {setting.paper.ring_s / setting.paper.lv_xattn_s:.2f}"
    return told


if __name__ == "__main__":
    main()
