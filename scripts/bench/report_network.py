"""The network benchmark's part of `docs/benchmarks.md`: the paper's clusters in proportion, tiles, real blocks."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from report import Row, figure, groups, measured_on, rows_of, shown, table

TICKS = (1, 2, 5, 10, 20, 50)
NAMES = {"network-paper": "the paper's clusters in proportion, emulated blocks", "network-real": "real blocks"}


def section(folder: Path) -> str | None:
    """All suites that were run."""
    paper, real, tiles = (rows_of(folder, f"network-{suite}") for suite in ("paper", "real", "tiles"))
    parts = [
        _clusters(folder, "network-paper", paper, EMULATED) if paper else "",
        _tiles(folder, tiles) if tiles else "",
        _clusters(folder, "network-real", real, REAL) if real else "",
    ]
    found = [part for part in parts if part]
    if not found:
        return None
    every = [row for row in paper + real + tiles if row["mode"] != "none"]
    off = median(abs(float(row["predicted_s"]) / float(row["seconds"]) - 1) for row in every)
    told = f"The planner's cost model is {off:.1%} off in the median over the {len(every)} rows of this section."
    return "\n\n".join(["## Cross-attention over a network", INTRODUCTION, told, *found])


INTRODUCTION = """\
`scripts/bench/network.py`: ranks are processes in network namespaces, each behind a link of a capped speed (`tc tbf`,
both directions), gloo between them. Times are of forward and backward of one call, of the slowest rank, the median
over repetitions in which the order of modes changes. In every timed run the bytes sent are those of the formulas, and
all strategies compute as many blocks, or, where blocks are real, the same results. `none` is the same blocks by the
same executor without transfers. "By arithmetic" is what the planner's cost model says, given the time of a block as
`none` has it and the link's speed, measured before."""

EMULATED = """\
A block takes a set time off the processor (backward 2.5 times forward) while the real bytes travel, so that 8 ranks
run at once on few cores. Kept from the paper (arXiv 2502.02406, tables 3 and 4): queries to keys, heads to key heads,
and the time of a block to the time of a transfer, from the paper's own seconds (block: LV-XAttn's cross-attention /
3.5 n; transfer: Ring's / 3 (n - 1)). Scaled: bytes and seconds, each by one factor; 16 A100 to 8 ranks, each with a
link of its own. Two rings: ours, which leaves K and V as they are under GQA and sums dK, dV in float32; and the
paper's, "expanded", which moves them repeated for every query head, dK, dV in bf16. `waiting`: transfers first, then
blocks."""

REAL = """\
As many ranks as cores, float32, the caps set so that a transfer takes as many blocks as on the paper's cluster. Ranks
compare their results in each run. A core that moves bytes does not compute meanwhile, which GPUs' links do."""


def _clusters(folder: Path, name: str, rows: list[Row], text: str) -> str:
    by_setting = groups(rows, "setting")
    path = folder / f"{name}.png"
    with figure(path, 9, 2.6 * -(-len(by_setting) // 2), 2, -(-len(by_setting) // 2)) as axes:
        for axis, (setting, its) in zip(axes or [], by_setting.items(), strict=False):
            its = [row for row in its if row["mode"] != "none"][::-1]
            axis.barh([row["mode"] for row in its], [float(row["over_none"]) for row in its], color="#4878a8")
            axis.plot([_over_none(row) for row in its], range(len(its)), "k|", markersize=9)
            axis.axvline(1, color="#888888", linewidth=0.8)
            axis.set_xscale("log")
            axis.set_xticks(TICKS, map(str, TICKS))
            axis.minorticks_off()
            axis.set_xlim(0.9, 1.3 * max(float(row["over_none"]) for row in its))
            axis.set_title(f"{setting}: time over none", fontsize=9)
        for axis in (axes or [])[len(by_setting) :]:
            axis.set_axis_off()
    head = ["setting", "ring / LV-XAttn", "by arithmetic", "expanded / LV-XAttn", "by arithmetic", "paper"]
    summary = table([*head, "LV-XAttn / none"], [_summary(setting, its) for setting, its in by_setting.items()])
    figures = shown(path, "Time of each mode over that without transfers; marks: by arithmetic")
    details = "\n\n".join(_setting(setting, its) for setting, its in by_setting.items())
    return f"### {NAMES[name].capitalize()}\n\n{text}\n\n{measured_on(rows)}\n\n{summary}\n{figures}\n{details}"


def _over_none(row: Row) -> float:
    return float(row["predicted_s"]) / float(row["seconds"]) * float(row["over_none"])


def _summary(setting: str, rows: list[Row]) -> list[str]:
    of = {row["mode"]: row for row in rows}
    lv, cells = of["lv-xattn"], [setting]
    for ring in ("ring", "ring, expanded"):
        cells += [f"{float(of[ring][name]) / float(lv[name]):.2f}" for name in ("seconds", "predicted_s")]
    if "paper_ring_s" in lv:
        cells.append(f"{float(lv['paper_ring_s']) / float(lv['paper_lv_xattn_s']):.2f}")
    return [*cells, f"{float(lv['over_none']):.3f}"]


def _setting(name: str, rows: list[Row]) -> str:
    row = rows[0]
    origin = ""
    if "paper_model" in row:
        origin = (
            f"{row['paper_model']} on {row['paper_gpus']} {row['paper_cluster']}, {int(row['paper_rows']):,} queries "
            f"and {int(row['paper_keys']):,} keys, as "
        )
    shape = (
        f"{origin}{row['ranks']} ranks of {row['rows']} rows and {row['keys']} keys, {row['heads']} heads, "
        f"{row['kv_heads']} KV heads of {row['dim']}, {row['dtype']}; a block's forward "
        f"{float(row['block_ms']):.3g} ms, links {_link(row)}."
    )
    head = ["mode", "ms", "least", "most", "over none", "MB sent", "by arithmetic, ms"]
    return f"**{name}**: {shape}\n\n{table(head, map(_cells, rows))}"


def _link(row: Row) -> str:
    delivered = f"{float(row['link_mbit']):.0f} Mbit/s"
    return f"capped at {float(row['cap_mbit']):.0f} Mbit/s, {delivered} delivered" if "cap_mbit" in row else delivered


def _cells(row: Row) -> list[str]:
    seconds = [f"{float(row[name]) * 1e3:.1f}" for name in ("seconds", "least_s", "most_s")]
    sent = f"{int(row['sent_bytes']) / 1e6:.2f}"
    return [row["mode"], *seconds, f"{float(row['over_none']):.3f}", sent, f"{float(row['predicted_s']) * 1e3:.1f}"]


def _tiles(folder: Path, rows: list[Row]) -> str:
    by_setting = groups(rows, "setting")
    path, lines = folder / "network-tiles.png", []
    with figure(path, 11, 2.8, len(by_setting)) as axes:
        for i, (setting, its) in enumerate(by_setting.items()):
            tiles = [row for row in its if row["mode"] != "none"]
            lines.append(_tile_cells(setting, tiles))
            if axes:
                names = [row["tile"] for row in tiles]
                axes[i].bar(names, [float(row["seconds"]) for row in tiles], color="#4878a8")
                axes[i].plot(names, [float(row["predicted_s"]) for row in tiles], "k_", markersize=14)
                axes[i].set_title(setting, fontsize=8)
    head = ["setting", "measured, ms", "by arithmetic, ms", "cost model's best", "its place in the measurement"]
    figures = shown(path, "Seconds of each tile; marks: by arithmetic")
    title = "### Tiles, on both sides of the crossover"
    return f"{title}\n\n{TILES}\n\n{measured_on(rows)}\n\n{table(head, lines)}\n{figures}"


TILES = """\
All tiles (a, b) of n ranks: (n, 1) is LV-XAttn, (1, n) is Ring Attention. A setting is called by its ranks, and by rows
and keys of each; 8 heads, 2 KV heads of 64, so that rows and keys weigh the same where there are four times as many
keys. Emulated blocks of 10 ms at links of 100 Mbit/s: transfers take longer than blocks, else every tile is as fast."""


def _tile_cells(setting: str, tiles: list[Row]) -> list[str]:
    best = min(tiles, key=lambda row: float(row["predicted_s"]))
    place = 1 + sum(float(row["seconds"]) < float(best["seconds"]) for row in tiles)
    measured, predicted = (
        ", ".join(f"{row['tile']}: {float(row[name]) * 1e3:.0f}" for row in tiles)
        for name in ("seconds", "predicted_s")
    )
    return [setting, measured, predicted, best["tile"], f"{place} of {len(tiles)}"]
