"""The memory benchmark's part of `docs/benchmarks.md`: what a step keeps, the longest video, and what that costs."""

from __future__ import annotations

from pathlib import Path

from report import Row, figure, groups, measured_on, rows_of, shown, table

INTRODUCTION = """\
`scripts/bench/memory.py`: real models with every width divided by the scale given, real ranks; bytes are those of the
rank with most. "Kept" is what autograd holds for the backward pass, "peak" the most that was allocated at one time;
parameters and their gradients are in neither. "Planner" is its estimate of the peak. The largest video is the one whose
peak stays within a budget, the same for all: what lv-xattn without recomputation needs; ">=" where the text has no
place for the placeholders of more. The paper (arXiv 2502.02406, Figure 6) fits 1.6 times (mPLUG-Owl3-7b) and 1.5 times
(OpenFlamingo-3b) the frames, for less than 8% of a step."""


def section(folder: Path) -> str | None:
    """Tables by family, and a figure over the number of frames."""
    rows = rows_of(folder, "memory")
    if not rows:
        return None
    by_family = groups(rows, "family")
    path = folder / "memory.png"
    with figure(path, 9, 3.4, len(by_family)) as axes:
        for axis, (family, its) in zip(axes or [], by_family.items(), strict=False):
            most = max(int(row["ranks"]) for row in its)
            ours = [row for row in its if row["measure"] == "bytes" and int(row["ranks"]) == most]
            for way, points in groups(ours, "strategy", "recompute").items():
                strategy, again = way.split()
                frames, peaks = ([int(row[name]) for row in points] for name in ("frames", "peak_bytes"))
                style = "-" if again == "True" else "--"
                axis.plot(
                    frames, [peak / 2**20 for peak in peaks], style, marker=".", label=f"{strategy}, {_kv(again)}"
                )
            axis.set_title(f"{family}, {most} ranks", fontsize=9)
            axis.set_xlabel("frames", fontsize=8)
            axis.set_ylabel("peak, MiB", fontsize=8)
            axis.set_ylim(bottom=0)
            axis.locator_params(axis="x", integer=True)
            axis.legend(fontsize=6, frameon=False)
    parts = [_family(family, its) for family, its in by_family.items()]
    head = f"## Memory\n\n{INTRODUCTION}\n\n{measured_on(rows)}\n{shown(path, 'Peak over the number of frames')}"
    return "\n\n".join([head, *parts])


def _family(family: str, rows: list[Row]) -> str:
    row = rows[0]
    held = [x for x in rows if x["measure"] == "bytes"]
    largest = {(x["ranks"], x["strategy"], x["recompute"]): x for x in rows if x["measure"] == "largest"}
    costs = [x for x in rows if x["measure"] == "cost"]
    lines = []
    for x in held:
        fits = largest.get((x["ranks"], x["strategy"], x["recompute"]), {})
        sizes = [f"{int(x[name]) / 2**20:.2f}" for name in ("kept_bytes", "peak_bytes", "planned_bytes")]
        least = ">= " if "capped" in fits else ""  # as many as the text has places for
        largest_video = least + fits["frames"] if fits else ""
        longer = f"{least}{float(fits['longer']):.2f}" if "longer" in fits else ""
        lines.append([x["ranks"], x["strategy"], _kv(x["recompute"]), x["frames"], *sizes, largest_video, longer])
    head = [
        "ranks",
        "strategy",
        "K and V",
        "frames",
        "kept, MiB",
        "peak, MiB",
        "planner, MiB",
        "largest video",
        "times",
    ]
    told = "\n".join(
        f"- {x['ranks']} rank{'' if x['ranks'] == '1' else 's'}, {x['frames']} frames, {x['text']} tokens: a step "
        f"takes {float(x['again_s']):.3f} s with recomputation, {float(x['kept_s']):.3f} s without; by the pairs' "
        f"median {float(x['share']):.1%} of it."
        for x in costs
    )
    about = f"Widths / {row['scale']}, {row['text']} tokens, {row['dtype']}, {row['device']}."
    return f"### {family} ({row['model']})\n\n{about}\n\n{table(head, lines)}\n\n{told}"


def _kv(recompute: str) -> str:
    return "again" if recompute == "True" else "kept"
