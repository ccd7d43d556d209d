"""The decoding benchmark's part of `docs/benchmarks.md`."""

from __future__ import annotations

from pathlib import Path

from report import Row, figure, groups, measured_on, rows_of, shown, table

INTRODUCTION = """\
`scripts/bench/decode.py`: greedy decoding after many images, patched against unpatched on one process; models of width
512 in 8 layers, float32, random weights. The tokens are equal in the timed runs. Unpatched IDEFICS and OpenFlamingo
project K and V of all images again for every token; patched, they are projected once per prompt."""


def section(folder: Path) -> str | None:
    """A table, and a figure over the number of images."""
    rows = rows_of(folder, "decode")
    if not rows:
        return None
    path = folder / "decode.png"
    with figure(path, 6, 3.2) as axes:
        if axes:
            for way, its in groups([row for row in rows if row["ranks"] == "1"], "family").items():
                images = [int(row["images"]) for row in its]
                (line,) = axes[0].plot(images, _tokens(its, "patched"), marker=".", label=way)
                axes[0].plot(images, _tokens(its, "unpatched"), "--", marker=".", color=line.get_color())
            axes[0].set_xlabel("images")
            axes[0].set_ylabel("tokens/s (dashed: unpatched)")
            axes[0].set_yscale("log")
            axes[0].legend(fontsize=7, frameon=False)
    head = ["family", "images", "visual keys", "ranks", "tokens/s", "unpatched", "times", "prompt, s", "unpatched, s"]
    body = table(head, map(_cells, rows))
    return f"## Decoding\n\n{INTRODUCTION} {measured_on(rows)}\n\n{body}\n{shown(path, 'Tokens per second')}"


def _tokens(rows: list[Row], who: str) -> list[float]:
    return [1 / float(row[f"{who}_s_per_token"]) for row in rows]


def _cells(row: Row) -> list[str]:
    speeds = [f"{1 / float(row[f'{who}_s_per_token']):.1f}" for who in ("patched", "unpatched")]
    prompts = [f"{float(row[f'{who}_prompt_s']):.2f}" for who in ("patched", "unpatched")]
    return [
        *(row[name] for name in ("family", "images", "visual_keys", "ranks")),
        *speeds,
        f"{float(row['ratio']):.1f}",
        *prompts,
    ]
