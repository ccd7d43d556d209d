"""The part of `docs/benchmarks.md` on whole training steps: their time, and where it goes."""

from __future__ import annotations

from pathlib import Path

from report import Row, figure, groups, measured_on, rows_of, shown, table

SHARE = "_share"
INTRODUCTION = """\
`scripts/bench/model_step.py`: forward, backward, the average of gradients over the ranks, and AdamW, of every family at
a size for CPUs (width 512 in 8 layers, two of them with cross-attention), patched and unpatched. `times` is a patched
step over an unpatched one on one process, the median of pairs taken one after the other; loss and gradient norm agree.
Where time goes is measured in steps of their own: cross- and self-attention with their projections; the vision tower
with a resampler or projector; transfers, as far as computation does not hide them; the average of gradients; the rest.
Ranks share this machine's cores, so more of them than cores are not faster."""


def section(folder: Path) -> str | None:
    """A table, and a figure of the shares."""
    rows = rows_of(folder, "model_step")
    if not rows:
        return None
    parts = [name.removesuffix(SHARE) for name in rows[0] if name.endswith(SHARE)]
    path, families = folder / "model_step.png", groups(rows, "family")
    with figure(path, 9, 2.4 * -(-len(families) // 2), 2, -(-len(families) // 2)) as axes:
        for axis, (family, its) in zip(axes or [], families.items(), strict=False):
            its, left = its[::-1], [0.0] * len(its)
            for part in parts:
                seconds = [_share(row, part) * float(row["step_s"]) for row in its]
                axis.barh([f"{row['who']}, n = {row['ranks']}" for row in its], seconds, left=left, label=part)
                left = [a + b for a, b in zip(left, seconds, strict=True)]
            axis.set_title(f"{family}: seconds of a step", fontsize=9)
        for axis in (axes or [])[:1]:
            axis.legend(fontsize=6, frameon=False)
        for axis in (axes or [])[len(families) :]:
            axis.set_axis_off()
    head = ["family", "ranks", "", "step, s", "times", *parts]
    body = table(head, ([*_cells(row), *(f"{_share(row, part):.1%}" for part in parts)] for row in rows))
    return f"## A training step\n\n{INTRODUCTION}\n\n{measured_on(rows)}\n\n{body}\n{shown(path, 'Seconds by part')}"


def _share(row: Row, part: str) -> float:
    return float(row.get(f"{part}{SHARE}", 0))


def _cells(row: Row) -> list[str]:
    ratio = f"{float(row['ratio']):.2f}" if "ratio" in row else ""
    return [row["family"], row["ranks"], row["who"], f"{float(row['step_s']):.3f}", ratio]
