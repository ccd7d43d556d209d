"""Tables and figures made from the rows of benchmarks, for the terminal and for `docs/benchmarks.md`.

In the page, a generated part stands between the lines `<!-- rows: NAME -->` and `<!-- end of rows -->`, where NAME is a
key of `PARTS`; the text around it is written by hand. A part is a function from the folder of rows to Markdown. It also
draws its figure into that folder if matplotlib is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rows import groups, read

Row = dict[str, str]
Cell = Callable[[Row], str]
MACHINE = ("hardware", "threads", "cuda", "torch", "transformers", "commit")
TICKS = (1, 2, 5, 10, 20, 50)


def update(page: str, folder: Path) -> str:
    return re.sub(
        r"(?s)(<!-- rows: (\S+) -->\n).*?(<!-- end of rows -->)",
        lambda match: f"{match[1]}\n{PARTS[match[2]](folder) or 'No rows.'}\n\n{match[3]}",
        page,
    )


def network_error(folder: Path) -> str:
    rows = [row for suite in ("paper", "real", "tiles") for row in read(folder / f"network-{suite}.csv")]
    errors = [abs(_ratio(row, "predicted_s", "seconds") - 1) for row in rows if row["mode"] != "none"]
    if not errors:
        return ""
    return f"The median error of the planner's cost model is {median(errors):.1%} over the {len(errors)} rows below."


def network_clusters(folder: Path, name: str) -> str:
    rows, path = read(folder / f"{name}.csv"), folder / f"{name}.png"
    settings, panels = groups(rows, "setting"), {}
    for setting, modes in settings.items():
        bars = [(row, float(row["over_none"])) for row in modes if row["mode"] != "none"]
        panels[f"{setting}: time over none"] = [
            (row["mode"], length, _ratio(row, "predicted_s", "seconds") * length) for row, length in bars
        ]
    bar_figure(path, panels, log_scale=True)
    figure = shown(path, "Time of each mode over that of mode none; marks: predicted")
    return joined(rows, ratio_table(list(settings.values())), figure, *map(setting_table, settings.values()))


def ratio_table(settings: Sequence[Sequence[Row]]) -> str:
    lines = []
    for rows in settings:
        modes = {row["mode"]: row for row in rows}
        lv = modes["lv-xattn"]
        line = {"setting": lv["setting"], "over_none": lv["over_none"]}
        for name, mode in (("ring", "ring"), ("expanded", "ring, expanded")):
            for suffix, column in (("", "seconds"), ("_predicted", "predicted_s")):
                line[name + suffix] = str(float(modes[mode][column]) / float(lv[column]))
        if "paper_ring_s" in lv:
            line["paper"] = str(_ratio(lv, "paper_ring_s", "paper_lv_xattn_s"))
        lines.append(line)
    names = {"ring / LV-XAttn": "ring", "predicted": "ring_predicted", "expanded / LV-XAttn": "expanded"}
    names |= {"predicted ": "expanded_predicted", "paper": "paper"}
    ratios = {name: number(column, ".2f") for name, column in names.items()}
    return table(lines, {"setting": text("setting"), **ratios, "LV-XAttn / none": number("over_none", ".3f")})


def setting_table(rows: Sequence[Row]) -> str:
    row, origin = rows[0], ""
    if "paper_model" in row:
        origin = (
            f"{row['paper_model']} on {row['paper_gpus']} {row['paper_cluster']}, {int(row['paper_rows']):,} queries "
            f"and {int(row['paper_keys']):,} keys, as "
        )
    speed = f"{float(row.get('link_mbit', 'nan')):.0f} Mbit/s"
    link = f"capped at {float(row['cap_mbit']):.0f} Mbit/s, {speed} delivered" if "cap_mbit" in row else speed
    description = (
        f"**{row['setting']}**: {origin}{row['ranks']} ranks of {row['rows']} rows and {row['keys']} keys, "
        f"{row['heads']} heads, {row['kv_heads']} KV heads of {row['dim']}, {row['dtype']}; a block's forward pass "
        f"{float(row['block_ms']):.3g} ms, links {link}."
    )
    times = {"ms": "seconds", "min": "least_s", "max": "most_s"}
    columns = {"mode": text("mode")} | {name: number(column, ".1f", 1e3) for name, column in times.items()}
    columns |= {"over none": number("over_none", ".3f"), "MB sent": number("sent_bytes", ".2f", 1e-6)}
    columns |= {"predicted, ms": number("predicted_s", ".1f", 1e3)}
    return f"{description}\n\n{table(rows, columns)}"


def end_to_end(folder: Path) -> str:
    rows = read(folder / "end-to-end.csv")
    cases = list(groups(rows, "blocks", "setting").values())
    errors = [abs(_ratio(row, "predicted_s", "seconds") - 1) for row in rows if row["mode"] != "none"]
    error = f"The median error of the predictions is {median(errors):.1%} over {len(errors)} rows." if errors else ""
    return joined(rows, error, step_table(cases), *map(setting_table, cases))


def step_table(cases: Sequence[Sequence[Row]]) -> str:
    """Return a line per case: steps over those of LV-XAttn, the paper's, and "auto" over the best strategy."""
    lines = []
    for rows in cases:
        modes = {row["mode"].partition(" ")[0] if "ulysses" in row["mode"] else row["mode"]: row for row in rows}
        lv = modes["lv-xattn"]
        line = lv | {name: row["over_lv_xattn"] for name, row in modes.items()}
        if "paper_ring_s" in lv:
            line["paper"] = str(_ratio(lv, "paper_ring_s", "paper_lv_xattn_s"))
        lines.append(line)
    columns = {"case": text("setting"), "blocks": text("blocks"), "ranks": text("ranks")}
    names = {"ring / LV-XAttn": "ring", "expanded / LV-XAttn": "ring, expanded", "paper": "paper"}
    columns |= {name: number(column, ".2f") for name, column in (names | {"Ulysses / LV-XAttn": "ulysses"}).items()}
    columns |= {"LV-XAttn / none": number("over_none", ".3f"), "auto": text("selected")}
    columns |= {"auto / best": number("auto_over_best", ".3f"), "spread": number("spread", ".3f")}
    shares = {"cross-attention": "cross_share", "paper's": "paper_cross_share"}
    columns |= {name: number(column, ".0%") for name, column in shares.items()} | {"load": number("load", ".1f")}
    return table(lines, columns)


def mesh_shapes(folder: Path) -> str:
    rows, path = read(folder / "network-tiles.csv"), folder / "network-tiles.png"
    settings = groups([row for row in rows if row["mode"] != "none"], "setting")
    panels = {
        setting: [(row["tile"], float(row["seconds"]), float(row["predicted_s"])) for row in shapes]
        for setting, shapes in settings.items()
    }
    bar_figure(path, panels, columns=4)
    figure = shown(path, "Seconds of each mesh shape; marks: predicted")
    return joined(rows, mesh_table(list(settings.values())), figure)


def mesh_table(settings: Sequence[Sequence[Row]]) -> str:
    lines = []
    for shapes in settings:
        best = min(shapes, key=lambda row: float(row["predicted_s"]))
        place = 1 + sum(float(row["seconds"]) < float(best["seconds"]) for row in shapes)
        line = {"setting": best["setting"], "best": best["tile"], "place": f"{place} of {len(shapes)}"}
        for name in ("seconds", "predicted_s"):
            line[name] = ", ".join(f"{row['tile']}: {float(row[name]) * 1e3:.0f}" for row in shapes)
        lines.append(line)
    columns = {"setting": "setting", "measured, ms": "seconds", "predicted, ms": "predicted_s"}
    columns |= {"best as predicted": "best", "its place as measured": "place"}
    return table(lines, {name: text(column) for name, column in columns.items()})


def memory(folder: Path) -> str:
    rows, path = read(folder / "memory.csv"), folder / "memory.png"
    panels = {}
    for family, measured in groups(rows, "family").items():
        ranks = max(int(row["ranks"]) for row in measured)
        shown_rows = [row for row in measured if row["measure"] == "bytes" and int(row["ranks"]) == ranks]
        panels[f"{family}, {ranks} ranks"] = {
            f"{points[0]['strategy']}, {_key_values(points[0])}": (
                [int(row["frames"]) for row in points],
                [int(row["peak_bytes"]) / 2**20 for row in points],
                f"C{index}-" if points[0]["recompute"] == "True" else f"C{index}--",
            )
            for index, modes in enumerate(groups(shown_rows, "strategy").values())
            for points in groups(modes, "recompute").values()
        }
    line_figure(path, panels, "frames", "peak, MiB")
    families = [memory_of_family(measured) for measured in groups(rows, "family").values()]
    return joined(rows, shown(path, "Peak over the number of frames"), *families)


def memory_of_family(rows: Sequence[Row]) -> str:
    mode = ("ranks", "strategy", "recompute")
    longest = {tuple(row[name] for name in mode): row for row in rows if row["measure"] == "largest"}
    lines = []
    for row in (row for row in rows if row["measure"] == "bytes"):
        fits = longest.get(tuple(row[name] for name in mode), {})
        at_least = ">= " if "capped" in fits else ""  # the text cannot hold more placeholders
        longer = f"{at_least}{float(fits['longer']):.2f}" if "longer" in fits else ""
        lines.append(row | {"longest": at_least + fits.get("frames", ""), "longer": longer})
    sizes = {"saved, MiB": "kept_bytes", "peak, MiB": "peak_bytes", "planner, MiB": "planned_bytes"}
    columns = {"ranks": text("ranks"), "strategy": text("strategy"), "K and V": _key_values, "frames": text("frames")}
    columns |= {name: number(column, ".2f", 2**-20) for name, column in sizes.items()}
    columns |= {"longest video": text("longest"), "ratio": text("longer")}
    costs = "\n".join(
        f"- {row['ranks']} rank{'' if row['ranks'] == '1' else 's'}, {row['frames']} frames, {row['text']} tokens: a "
        f"step takes {float(row['again_s']):.3f} s with recomputation and {float(row['kept_s']):.3f} s without; "
        f"recomputation takes {float(row['share']):.1%} of it (median of pairs)."
        for row in rows
        if row["measure"] == "cost"
    )
    row = rows[0]
    about = f"Widths / {row['scale']}, {row['text']} tokens, {row['dtype']}, {row['device']}."
    return f"### {row['family']} ({row['model']})\n\n{about}\n\n{table(lines, columns)}\n\n{costs}".rstrip()


def _key_values(row: Row) -> str:
    return "recomputed" if row["recompute"] == "True" else "stored"


def decoding(folder: Path) -> str:
    rows, path = read(folder / "decode.csv"), folder / "decode.png"
    lines = {}
    families = groups([row for row in rows if row["ranks"] == "1"], "family")
    for index, (family, points) in enumerate(families.items()):
        for name, style in (("patched", "-"), ("unpatched", "--")):
            speeds = [1 / float(row[f"{name}_s_per_token"]) for row in points]
            lines[f"{family}, {name}"] = [int(row["images"]) for row in points], speeds, f"C{index}{style}"
    line_figure(path, {"tokens per second": lines}, "images", "tokens/s", log_scale=True)
    return joined(rows, decoding_table(rows), shown(path, "Tokens per second"))


def decoding_table(rows: Sequence[Row]) -> str:
    columns = {name.replace("_", " "): text(name) for name in ("family", "images", "visual_keys", "ranks")}
    for name, column in {"tokens/s": "patched_s_per_token", "unpatched": "unpatched_s_per_token"}.items():
        columns[name] = lambda row, column=column: f"{1 / float(row[column]):.1f}"
    columns |= {"ratio": number("ratio", ".1f"), "prompt, s": number("patched_prompt_s", ".2f")}
    return table(rows, columns | {"unpatched, s": number("unpatched_prompt_s", ".2f")})


PARTS: dict[str, Callable[[Path], str]] = {
    "network-error": network_error,
    "network-paper": partial(network_clusters, name="network-paper"),
    "network-tiles": mesh_shapes,
    "network-real": partial(network_clusters, name="network-real"),
    "end-to-end": end_to_end,
    "memory": memory,
    "decode": decoding,
}


def joined(rows: Sequence[Row], *parts: str) -> str:
    """Return the machines of the rows and the parts, as paragraphs; nothing if there are no rows."""
    if not rows:
        return ""
    machines = [", ".join(f"{name} {row[name]}" for name in MACHINE if name in row) for row in rows]
    measured_on = "Measured on " + "; and on ".join(dict.fromkeys(machines)) + "."
    return "\n\n".join(filter(None, [measured_on, *parts]))


def table(rows: Sequence[Row], columns: Mapping[str, Cell]) -> str:
    """Return a Markdown table; columns of numbers are aligned right."""
    body = [[cell(row) for cell in columns.values()] for row in rows]
    numeric = [all(re.match(r"(>= )?[-+\d]|$", line[i]) for line in body) for i in range(len(columns))]
    lines = [[name.strip() for name in columns], ["---:" if right else "---" for right in numeric], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def text(column: str) -> Cell:
    return lambda row: row.get(column, "")


def number(column: str, form: str, factor: float = 1.0) -> Cell:
    return lambda row: f"{float(row[column]) * factor:{form}}" if column in row else ""


def _ratio(row: Row, column: str, other: str) -> float:
    return float(row[column]) / float(row[other])


def shown(path: Path, description: str) -> str:
    """Return Markdown that shows a figure in the folder of rows, which lies beside the page, if it exists."""
    return f"![{description}]({path.parent.name}/{path.name})" if path.exists() else ""


def bar_figure(
    path: Path, panels: Mapping[str, Sequence[tuple[str, float, float]]], columns: int = 2, log_scale: bool = False
) -> None:
    """Draw horizontal bars: per panel title a list of (label, length of the bar, position of the mark)."""
    with _figure(path, panels, columns, 2.6) as axes:
        for axis, (title, bars) in zip(axes, panels.items(), strict=False):
            labels, lengths, marks = zip(*bars[::-1], strict=True)
            axis.barh(labels, lengths, color="#4878a8")
            axis.plot(marks, range(len(marks)), "k|", markersize=9)
            axis.set_title(title, fontsize=9)
            if log_scale:
                axis.axvline(1, color="#888888", linewidth=0.8)
                axis.set_xscale("log")
                axis.set_xticks(TICKS, map(str, TICKS))
                axis.minorticks_off()
                axis.set_xlim(0.9, 1.3 * max(lengths))


def line_figure(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[list[int], list[float], str]]],
    x_label: str,
    y_label: str,
    log_scale: bool = False,
) -> None:
    """Draw lines: per panel title and label (x, y, matplotlib's format of the line)."""
    with _figure(path, panels, len(panels), 3.4) as axes:
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            for label, (x, y, style) in lines.items():
                axis.plot(x, y, style, marker=".", label=label)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel(x_label, fontsize=8)
            axis.set_ylabel(y_label, fontsize=8)
            axis.locator_params(axis="x", integer=True)
            if log_scale:
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
            axis.legend(fontsize=6, frameon=False, handlelength=4)


@contextmanager
def _figure(path: Path, panels: Mapping[str, Any], columns: int, height: float) -> Iterator[list[Any]]:
    """Yield the axes of a new figure and save it; yield no axes without panels or without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        matplotlib = None
    if not panels or matplotlib is None:
        yield []
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(panels) // columns)
    drawn, axes = pyplot.subplots(rows, columns, figsize=(9, height * rows), squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    yield list(axes.flat)
    drawn.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(drawn)
