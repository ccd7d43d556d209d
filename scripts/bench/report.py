"""Tables and figures made from the rows of benchmarks, for the terminal and for `docs/benchmarks.md`.

In the page, a generated part stands between the lines `<!-- rows: NAME -->` and `<!-- end of rows -->`; the text around
it is written by hand. `run_all.py` has the table of parts. A part is a function from the folder of rows to Markdown:
`part` makes it from the tables of a benchmark, which its terminal shows too, and perhaps a figure, which is drawn into
that folder if matplotlib is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median

from harness import Row, groups, read

BLUE, ORANGE, RED, GREY = "#2b6cb0", "#dd8a2f", "#c0392b", "#9aa0a6"
MACHINE = ("hardware", "threads", "cuda", "torch", "transformers", "commit")
HEADLINE = {
    "none": ("no communication", GREY),
    "lv-xattn": ("LV-XAttn", BLUE),
    "ring": ("Ring Attention", ORANGE),
    "ring, expanded": ("Ring Attention, K and V for every query head (as in the paper)", RED),
}


def update(page: str, folder: Path, parts: Mapping[str, Callable[[Path], str]]) -> str:
    return re.sub(
        r"(?s)(<!-- rows: (\S+) -->\n).*?(<!-- end of rows -->)",
        lambda match: f"{match[1]}\n{parts[match[2]](folder) or 'No rows.'}\n\n{match[3]}",
        page,
    )


def part(
    folder: Path,
    name: str,
    tables: Callable[[Sequence[Row]], str],
    figure: Callable[[Sequence[Row], Path], str] | None = None,
) -> str:
    """Return the part of a benchmark: the machines of its rows, the figure and the tables; nothing without rows."""
    rows = read(folder / f"{name}.jsonl")
    if not rows:
        return ""
    machines = [", ".join(f"{name} {row[name]}" for name in MACHINE if name in row) for row in rows]
    measured_on = "Measured on " + "; and on ".join(dict.fromkeys(machines)) + "."
    drawn = "" if figure is None else figure(rows, folder / f"{name}.png")
    return "\n\n".join(filter(None, [measured_on, drawn, tables(rows)]))


def network_error(folder: Path) -> str:
    rows = [row for suite in ("paper", "real", "tiles") for row in read(folder / f"network-{suite}.jsonl")]
    errors = prediction_errors(rows)
    if not errors:
        return ""
    return f"The median error of the planner's cost model is {median(errors):.1%} over the {len(errors)} rows below."


def prediction_errors(rows: Sequence[Row]) -> list[float]:
    return [abs(row["predicted_s"] / row["seconds"] - 1) for row in rows if row["mode"] != "none"]


def headline(folder: Path) -> str:
    """The headline in one figure: LV-XAttn and both rings over the same blocks without transfers."""
    rows, path = read(folder / "network-paper.jsonl"), folder / "headline.png"
    series = [
        Series(name, color, {cluster_name(row): row["over_none"] for row in rows if row["mode"] == mode})
        for mode, (name, color) in HEADLINE.items()
    ]
    title = "Cross-attention of a training step, over the time of its computation alone"
    ranks = "8 ranks over capped links, in the proportions of the paper's clusters; the time of a block is emulated"
    why = "OpenFlamingo shares no KV heads; Ring Attention here sends dK and dV in float32, the paper's ring in bf16"
    x_label = f"time / time without communication; less is better\n{ranks}\n{why}"
    grouped_bars(path, {"": series} if rows else {}, title=title, x_label=x_label, form=".2f")
    return shown(path, "LV-XAttn takes 1.01 to 1.03 of the time without communication; the rings 1.4 to 31 times")


def cluster_name(row: Row) -> str:
    """Return the model and the GPUs of the paper whose proportions a setting has."""
    return f"{row['paper_model']}\non {row['paper_gpus']} {row['paper_cluster']}"


def network_tables(rows: Sequence[Row]) -> str:
    """Return for each kind of settings a table of what they compare, and tables of the modes of each."""
    kinds: dict[Callable[..., str], list[list[Row]]] = {}
    for lines in groups(rows, "blocks", "setting").values():
        is_mesh = all(row["mode"].startswith("tile") for row in lines if row["mode"] != "none")
        kind = step_table if lines[0]["benchmark"] == "end_to_end" else mesh_table if is_mesh else ratio_table
        kinds.setdefault(kind, []).append(lines)
    parts = []
    for kind, settings in kinds.items():
        parts += [kind(settings), *map(setting_table, settings if kind is not mesh_table else ())]
    return "\n\n".join(parts)


def ratio_table(settings: Sequence[Sequence[Row]]) -> str:
    lines = []
    for rows in settings:
        modes = {row["mode"]: row for row in rows}
        lv = modes["lv-xattn"]
        line = {"setting": lv["setting"], "over_none": lv["over_none"]}
        for name, mode in (("ring", "ring"), ("expanded", "ring, expanded")):
            for suffix, column in (("", "seconds"), ("_predicted", "predicted_s")):
                line[name + suffix] = modes[mode][column] / lv[column]
        if "paper_ring_s" in lv:
            line["paper"] = lv["paper_ring_s"] / lv["paper_lv_xattn_s"]
        lines.append(line)
    columns = {"setting": "setting", "ring / LV-XAttn": "ring .2f", "predicted": "ring_predicted .2f"}
    columns |= {"expanded / LV-XAttn": "expanded .2f", "predicted ": "expanded_predicted .2f", "paper": "paper .2f"}
    return table(lines, columns | {"LV-XAttn / none": "over_none .3f"})


def setting_table(rows: Sequence[Row]) -> str:
    row, origin = rows[0], ""
    if "paper_model" in row:
        origin = (
            f"{row['paper_model']} on {row['paper_gpus']} {row['paper_cluster']}, {row['paper_rows']:,} queries "
            f"and {row['paper_keys']:,} keys, as "
        )
    speed = f"{row.get('link_mbit', nan):.0f} Mbit/s"
    link = f"capped at {row['cap_mbit']:.0f} Mbit/s, {speed} delivered" if "cap_mbit" in row else speed
    description = (
        f"**{row['setting']}**: {origin}{row['ranks']} ranks of {row['rows']} rows and {row['keys']} keys, "
        f"{row['heads']} heads, {row['kv_heads']} KV heads of {row['dim']}, {row['dtype']}; a block's forward pass "
        f"{row['block_ms']:.3g} ms, links {link}."
    )
    columns = {"mode": "mode", "ms": "seconds .1f 1e3", "min": "least_s .1f 1e3", "max": "most_s .1f 1e3"}
    columns |= {"over none": "over_none .3f", "MB sent": "sent_bytes .2f 1e-6", "predicted, ms": "predicted_s .1f 1e3"}
    return f"{description}\n\n{table(rows, columns)}"


def step_table(cases: Sequence[Sequence[Row]]) -> str:
    """Return a line per case: steps over those of LV-XAttn, the paper's, and "auto" over the best strategy; above it
    the error of the predictions."""
    lines = []
    for rows in cases:
        modes = {row["mode"].partition(" ")[0] if "ulysses" in row["mode"] else row["mode"]: row for row in rows}
        lv = modes["lv-xattn"]
        line = lv | {name.rpartition(" ")[2]: row["over_lv_xattn"] for name, row in modes.items()}
        if "paper_ring_s" in lv:
            line["paper"] = lv["paper_ring_s"] / lv["paper_lv_xattn_s"]
        lines.append(line)
    columns = {"case": "setting", "blocks": "blocks", "ranks": "ranks", "ring / LV-XAttn": "ring .2f"}
    columns |= {"expanded / LV-XAttn": "expanded .2f", "paper": "paper .2f", "Ulysses / LV-XAttn": "ulysses .2f"}
    columns |= {"LV-XAttn / none": "over_none .3f", "auto": "selected", "auto / best": "auto_over_best .3f"}
    columns |= {"spread": "spread .3f", "cross-attention": "cross_share .0%", "paper's": "paper_cross_share .0%"}
    columns |= {"load": "load .1f"}
    errors = prediction_errors([row for rows in cases for row in rows])
    error = f"The median error of the predictions is {median(errors):.1%} over {len(errors)} rows."
    return f"{error}\n\n{table(lines, columns)}"


def mesh_table(settings: Sequence[Sequence[Row]]) -> str:
    lines = []
    for rows in settings:
        shapes = [row for row in rows if row["mode"] != "none"]
        best = min(shapes, key=lambda row: row["predicted_s"])
        place = 1 + sum(row["seconds"] < best["seconds"] for row in shapes)
        line = {"setting": best["setting"], "best": best["tile"], "place": f"{place} of {len(shapes)}"}
        for name in ("seconds", "predicted_s"):
            line[name] = ", ".join(f"{row['tile']}: {row[name] * 1e3:.0f}" for row in shapes)
        lines.append(line)
    columns = {"setting": "setting", "measured, ms": "seconds", "predicted, ms": "predicted_s"}
    columns |= {"best as predicted": "best", "its place as measured": "place"}
    return table(lines, columns)


def memory_figure(rows: Sequence[Row], path: Path) -> str:
    panels = {}
    for measured in groups(rows, "family").values():
        ranks = max(row["ranks"] for row in measured)
        found = [row for row in measured if row["measure"] == "bytes" and row["ranks"] == ranks]
        frames = max(row["frames"] for row in found)
        found = [row for row in found if row["frames"] == frames]
        panels[f"{found[0]['model']}, {ranks} ranks, {frames} frames"] = [
            Series(
                f"K and V {name}",
                color,
                {row["strategy"]: row["peak_bytes"] / 2**20 for row in found if name.startswith(_key_values(row))},
            )
            for name, color in (("stored", GREY), ("recomputed (the default)", BLUE))
        ]
    title = "Peak memory of the rank with most, in forward and backward"
    grouped_bars(path, panels, title=title, x_label="peak, MiB", form=".1f")
    return shown(path, "Peak memory of each strategy, with K and V stored and recomputed")


def memory_tables(rows: Sequence[Row]) -> str:
    return "\n\n".join(memory_of_family(measured) for measured in groups(rows, "family").values())


def memory_of_family(rows: Sequence[Row]) -> str:
    mode = ("ranks", "strategy", "recompute")
    longest = {tuple(row[name] for name in mode): row for row in rows if row["measure"] == "largest"}
    lines = []
    for row in (row for row in rows if row["measure"] == "bytes"):
        fits = longest.get(tuple(row[name] for name in mode), {})
        at_least = ">= " if "capped" in fits else ""  # the text cannot hold more placeholders
        longer = f"{at_least}{fits['longer']:.2f}" if "longer" in fits else ""
        fit = {"longest": f"{at_least}{fits.get('frames', '')}", "longer": longer}
        lines.append(row | fit | {"key_values": _key_values(row)})
    columns = {"ranks": "ranks", "strategy": "strategy", "K and V": "key_values", "frames": "frames"}
    sizes = {"saved": "kept", "peak": "peak", "planner": "planned"}
    if any("visual_tokens" in row for row in lines):
        columns["visual tokens"] = "visual_tokens ,.0f"
    columns |= {f"{name}, MiB": f"{column}_bytes .2f {2**-20}" for name, column in sizes.items()}
    columns |= {"longest video": "longest", "ratio": "longer"}
    costs = "\n".join(
        f"- {row['ranks']} rank{'' if row['ranks'] == 1 else 's'}, {row['frames']} frames, {row['text']} tokens: a "
        f"step takes {row['again_s']:.3f} s with recomputation and {row['kept_s']:.3f} s without; "
        f"recomputation takes {row['share']:.1%} of it (median of pairs)."
        for row in rows
        if row["measure"] == "cost"
    )
    row = rows[0]
    about = f"Widths / {row['scale']}, {row['text']} tokens, {row['dtype']}, {row['device']}."
    return f"### {row['family']} ({row['model']})\n\n{about}\n\n{table(lines, columns)}\n\n{costs}".rstrip()


def _key_values(row: Row) -> str:
    return "recomputed" if row["recompute"] else "stored"


def decoding_figure(rows: Sequence[Row], path: Path) -> str:
    tokens = [row for row in rows if row["run"] == "token"]
    panels = {
        f"after {images} images": [
            Series(name, color, {row["family"]: 1 / row[f"{name}_s"] for row in points})
            for name, color in (("unpatched", GREY), ("patched", BLUE))
        ]
        for (images,), points in groups(tokens, "images").items()
    }
    grouped_bars(path, panels, title="Greedy decoding on one process", x_label="tokens per second", form=".0f")
    return shown(path, "Tokens per second, patched and unpatched")


def decoding_table(rows: Sequence[Row]) -> str:
    lines = []
    for measured in groups(rows, "family", "images").values():
        prompt, token = sorted(measured, key=lambda row: row["run"])
        rates = {name: 1 / token[f"{name}_s"] for name in ("patched", "unpatched")}
        lines.append(prompt | rates | {"ratio": rates["patched"] / rates["unpatched"]})
    columns = {"family": "family", "images": "images", "visual keys": "visual_keys"}
    columns |= {"tokens/s": "patched .1f", "unpatched": "unpatched .1f", "ratio": "ratio .1f"}
    return table(lines, columns | {"prompt, s": "patched_s .2f", "unpatched, s": "unpatched_s .2f"})


def decoder_only_table(rows: Sequence[Row]) -> str:
    columns = {"family": "family", "tokens": "tokens ,.0f", "ranks": "ranks", "attention": "attention"}
    return table(rows, columns | {"training step, MiB": "peak_mib .1f", "prompt, MiB": "prefill_mib .1f"})


def questions_table(rows: Sequence[Row]) -> str:
    lines = [row | {"ratio": row["first_cpu_s"] / row["next_cpu_s"]} for row in rows]
    columns = {"family": "family", "tokens": "tokens ,.0f", "ranks": "ranks"}
    columns |= {"first question, processor s": "first_cpu_s .1f", "next": "next_cpu_s .3f", "first / next": "ratio .0f"}
    return table(lines, columns | {"first, s": "first_s .1f", "next ": "next_s .3f"})


def gpu_tables(rows: Sequence[Row]) -> str:
    """Return the tables of `gpu.py`, and a line for each row that could not be measured."""
    by_measure = {name: found for (name,), found in groups([r for r in rows if "problem" not in r], "measure").items()}
    ceilings = ", ".join(f"{row['name']} {row['value']:.3g} {row['unit']}" for row in by_measure.get("ceiling", ()))
    parts = [f"Ceilings: {ceilings}." if ceilings else ""]
    for name, title in (("attention", "Attention without a mask"), ("masks", "Rows that see the frames before them")):
        if name in by_measure:
            parts.append(
                f"**{title}**, TFLOP/s of visible entries, forward / backward:\n\n{_by_kernel(by_measure[name])}"
            )
    if "pass" in by_measure:
        parts.append(f"**Whole passes**, peak memory above weights and inputs:\n\n{_by_mode(by_measure['pass'])}")
    for name, (title, columns) in GPU_TABLES.items():
        if name in by_measure:
            parts.append(f"**{title}**\n\n{table(by_measure[name], columns)}")
    problems = [row for row in rows if "problem" in row]
    named = ("measure", "model", "run", "mode", "kernel", "shape", "frames")
    lines = (f"- {', '.join(str(row[name]) for name in named if name in row)}: {row['problem']}" for row in problems)
    return "\n\n".join(filter(None, [*parts, "\n".join(lines)]))


GPU_TABLES = {
    "tower": (
        "Vision tower",
        {"model": "model", "frames": "frames", "frames/s": "frames_per_s .0f", "TFLOP/s": "tflops .0f"},
    ),
    "launches": (
        "A decoder layer with 8 tokens: the host's launches",
        {"model": "model", "forward, ms": "layer_forward_s .2f 1e3", "backward, ms": "layer_backward_s .2f 1e3"},
    ),
    "memory": (
        "Memory of a training step",
        {"model": "model", "mode": "mode", "text": "text ,.0f"}
        | {"GiB for 1,000 frames": "gib_per_1000_frames .1f", "longest video, frames": "longest ,.0f"},
    ),
    "decoding": (
        "Decoding, patched and unpatched in turn",
        {"model": "model", "frames": "frames", "patched, ms a token": "patched_ms .1f", "unpatched": "unpatched_ms .1f"}
        | {"ratio": "ratio .2f"},
    ),
    "ranks in one process": (
        "All ranks of a call in one process, over one rank",
        {"B,H,G,S,T,D": "shape", "algorithm": "algorithm", "ranks": "ranks", "ratio": "ratio .2f"},
    ),
}


def _by_kernel(rows: Sequence[Row]) -> str:
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    lines = []
    for (shape,), found in groups(rows, "shape").items():
        cells = {row["kernel"]: f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}" for row in found}
        lines.append({"shape": shape} | {f"k{i}": cells.get(name) for i, name in enumerate(kernels)})
    return table(lines, {"B,H,G,S,T,D": "shape"} | {name: f"k{i}" for i, name in enumerate(kernels)})


def _by_mode(rows: Sequence[Row]) -> str:
    lines = []
    for found in groups(rows, "model", "run", "frames", "text").values():
        line = dict(found[0])
        for row in found:
            peak = f", {row['peak_gib']:.1f} GiB" if "peak_gib" in row else ""
            line[f"{row['mode']}_cell"] = f"{row['ms']:,.0f} ms{peak}"
        lines.append(line)
    columns = {"model": "model", "pass": "run", "frames": "frames ,.0f", "text tokens": "text ,.0f"}
    columns |= {"patched": "patched_cell", "K and V stored": "stored_cell", "unpatched": "unpatched_cell"}
    return table(lines, columns)


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Return a Markdown table; columns of numbers are aligned right.

    `columns` has, by title, the name of a column of the rows, and for numbers a format and a factor, such as
    "seconds .1f 1e3". A title may end with spaces, so that two columns have the same one.
    """
    body = [[_cell(row, *column.split()) for column in columns.values()] for row in rows]
    numeric = [all(re.match(r"(>= )?[-+\d]|$", line[i]) for line in body) for i in range(len(columns))]
    lines = [[name.strip() for name in columns], ["---:" if right else "---" for right in numeric], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Row, column: str, form: str = "", factor: str = "1") -> str:
    value = row.get(column)
    if value is None:
        return ""
    return f"{value * float(factor):{form}}" if form else str(value)


def shown(path: Path, description: str) -> str:
    """Return Markdown that shows a figure in the folder of rows, which lies beside the page, if it exists."""
    return f"![{description}]({path.parent.name}/{path.name})" if path.exists() else ""


@dataclass(frozen=True)
class Series:
    """Bars of one kind: the name in the legend, the colour, and lengths by the name of the line."""

    name: str
    color: str
    lengths: Mapping[str, float]


def grouped_bars(path: Path, panels: Mapping[str, Sequence[Series]], *, title: str, x_label: str, form: str) -> None:
    """Draw groups of bars: per panel title the series, whose lines have the same names.

    `form` is the format of the value beside each bar. Nothing is drawn without panels or matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not panels:
        return
    lines = max(sum(len(s.lengths) for s in series) for series in panels.values())
    drawn = Figure(figsize=(9, 1.7 + 0.21 * lines), layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(title, fontsize=11, fontweight="bold")
    (axes,) = drawn.subplots(1, len(panels), squeeze=False)
    for axis, (name, series) in zip(axes, panels.items(), strict=True):
        names = list(series[0].lengths)
        thickness = 0.8 / len(series)
        for number, bars in enumerate(series):
            for place, line in enumerate(names):
                y, length = place + (number + 0.5) * thickness - 0.4, bars.lengths[line]
                axis.barh(y, length, 0.92 * thickness, color=bars.color, label=bars.name)
                axis.text(length, y, f"  {length:{form}}", va="center", fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_xlim(0, 1.18 * max(max(s.lengths.values()) for s in series))
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_xlabel(x_label, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8.5)
    found = {label: bar for bar, label in zip(*axes[0].get_legend_handles_labels(), strict=True)}
    drawn.legend(found.values(), found.keys(), loc="outside lower center", ncols=len(found), fontsize=9, frameon=False)
    drawn.savefig(path, dpi=130, metadata={"Software": None})
