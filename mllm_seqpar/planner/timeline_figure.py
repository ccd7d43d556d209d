"""A simulated timeline as a figure: a lane of computing and waiting above a lane of sending for each rank.

Operations before and after a schedule (Ulysses' all-to-all, gathering of features, projections) are not drawn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import ConfigError

from .call_cost import call_cost
from .plan import Plan
from .selection import duration
from .simulation import Timeline

COLORS = {"compute": "#4c78a8", "wait": "#e45756", "transfer": "#72b7b2"}
NAMES = {"compute": "computes a block", "wait": "waits", "transfer": "sends"}
MAX_RANKS = 16


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw one cross-attention layer of the best strategy to a file; its suffix chooses the format."""
    workload, spec = plan.workload, plan.best.spec
    panels = []
    for name, backward in (("forward", False), ("backward", True))[: 2 if workload.training else 1]:
        cost = call_cost(
            workload.cross_problem,
            spec,
            plan.cluster,
            backward=backward,
            visual=workload.visual,
            overlap=workload.overlap,
            record=True,
        )
        call, schedule = duration(cost.seconds), duration(cost.timeline.seconds)
        panels.append((f"{spec}, {name}: a call takes {call}, its schedule {schedule}", cost.timeline))
    title = f"One cross-attention layer of {workload.model.name}: {workload.frames} frames, {workload.text} text tokens"
    figure = timeline_figure(f"{title}, {workload.gpus} GPUs of {plan.cluster.name}", panels)
    try:
        figure.savefig(path, bbox_inches="tight")
    except ValueError as error:  # an unknown suffix
        raise ConfigError(f"--timeline {path}: {error}") from error


def timeline_figure(title: str, panels: Sequence[tuple[str, Timeline]]) -> Any:
    """Return a matplotlib Figure with one panel per (name, timeline), on one time scale; the first MAX_RANKS ranks."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--timeline needs matplotlib; install mllm-seqpar[plot]") from error
    longest = max(timeline.seconds for _, timeline in panels)
    heights = [min(timeline.ranks, MAX_RANKS) for _, timeline in panels]
    figure = Figure(figsize=(11, 1.6 + sum(0.4 * height + 0.9 for height in heights)), layout="constrained")
    figure.suptitle(title, fontsize="medium", fontweight="bold")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, timeline), height in zip(all_axes, panels, heights, strict=True):
        for rank in range(height):
            for kind, color in COLORS.items():
                spans = [span for span in timeline.spans[rank % timeline.period] if span.kind == kind]
                bars = [(span.start, span.end - span.start) for span in spans]
                lane = (rank + 0.45, 0.4) if kind == "transfer" else (rank + 0.05, 0.4)
                axes.broken_barh(bars, lane, facecolor=color, edgecolor="white", linewidth=0.3, label=NAMES[kind])
                for span in spans:
                    if span.end - span.start > 0.04 * longest:
                        middle = (span.start + span.end) / 2, lane[0] + lane[1] / 2
                        axes.text(*middle, span.label, fontsize=7, ha="center", va="center")
        more = timeline.ranks - height
        axes.set_title(name + (f" ({more} more ranks are not drawn)" if more else ""), loc="left", fontsize="small")
        axes.set_yticks([rank + 0.45 for rank in range(height)], [f"rank {rank}" for rank in range(height)])
        axes.set_ylim(height, 0)
        axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds))
        axes.tick_params(labelbottom=True, labelsize="small")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles[: len(NAMES)], labels[: len(NAMES)], loc="outside lower center", ncols=3, fontsize="small")
    return figure
