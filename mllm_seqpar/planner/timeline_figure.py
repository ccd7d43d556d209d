"""A simulated timeline as a figure: a lane of computing and waiting above a lane of sending for each rank.

Operations before and after a schedule (Ulysses' all-to-all, gathering of features, projections) are not drawn.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mllm_seqpar.errors import ConfigError

from .call_cost import call_cost, duration
from .plan import Plan, StrategyPlan
from .simulation import Timeline

COLORS = {"compute": "#4c78a8", "wait": "#e45756", "transfer": "#72b7b2"}
NAMES = {"compute": "computes a block", "wait": "waits for a transfer", "transfer": "sends"}
MAX_RANKS = 8
ROOM = 0.05
"""The part of the time axis that a label needs."""


class Panel(NamedTuple):
    """A strategy in the figure: its title, and its timelines one after the other, by the name of the pass."""

    title: str
    passes: Sequence[tuple[str, Timeline]]

    @property
    def ranks(self) -> int:
        return min(self.passes[0][1].ranks, MAX_RANKS)

    @property
    def seconds(self) -> float:
        return sum(timeline.seconds for _, timeline in self.passes)

    def starts(self) -> Iterator[tuple[float, str, Timeline]]:
        """Yield each pass with the time at which it begins."""
        begin = 0.0
        for name, timeline in self.passes:
            yield begin, name, timeline
            begin += timeline.seconds


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw one cross-attention layer, or decoder layer of a decoder-only model, to a file, whose suffix chooses the
    format.

    The best strategy is on top, and LV-XAttn and Ring Attention are below it on the same time axis, if the plan
    compares them.
    """
    by_name = {row.spec.strategy: row for row in plan.rows}
    compared = [by_name[name] for name in ("lv-xattn", "ring") if name in by_name and by_name[name] is not plan.best]
    workload = plan.workload
    video = f"{workload.frames:,} frames, {workload.text:,} text tokens"
    title = f"One {workload.compared} layer of {workload.model.name}: {video}"
    panels = [_panel(plan, row) for row in (plan.best, *compared)]
    figure = timeline_figure(f"{title}, {workload.gpus} GPUs of {plan.cluster.name}", panels)
    try:
        figure.savefig(path, bbox_inches="tight", dpi=150)
    except ValueError as error:  # an unknown suffix
        raise ConfigError(f"--timeline {path}: {error}") from error


def _panel(plan: Plan, row: StrategyPlan) -> Panel:
    workload, passes, calls = plan.workload, [], []
    problem, options = workload.problem(workload.compared), workload.call_options(workload.compared)
    for name, backward in (("forward", False), ("backward", True))[: 2 if workload.training else 1]:
        cost = call_cost(problem, row.spec, plan.cluster, backward=backward, record=True, **options)
        passes.append((name, cost.timeline))
        calls.append(f"{name} {duration(cost.timeline.seconds)}")
    return Panel(f"{row.spec}: {', '.join(calls)}", passes)


def timeline_figure(title: str, panels: Sequence[Panel]) -> Any:
    """Return a matplotlib Figure of the panels on one time scale; a panel has at most MAX_RANKS ranks."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--timeline needs matplotlib; install mllm-seqpar[plot]") from error
    longest = max(panel.seconds for panel in panels)
    heights = [panel.ranks for panel in panels]
    figure = Figure(figsize=(11, 1.4 + sum(0.4 * height + 0.7 for height in heights)), layout="constrained")
    figure.suptitle(title, fontsize="medium", fontweight="bold")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        for begin, name, timeline in panel.starts():
            for rank in range(panel.ranks):
                _draw_rank(axes, rank, begin, timeline, longest)
            axes.axvline(begin, color="#888888", linewidth=0.8)
            if timeline.seconds > ROOM * longest:
                axes.text(begin, 0, f" {name}", fontsize=8, va="bottom")
        axes.axvline(panel.seconds, color="#888888", linewidth=0.8)
        more = panel.passes[0][1].ranks - panel.ranks
        shown = f" ({more} more ranks are not drawn)" if more else ""
        axes.set_title(panel.title + shown, loc="left", fontsize="small", pad=14)
        axes.set_yticks([rank + 0.45 for rank in range(panel.ranks)], [f"rank {rank}" for rank in range(panel.ranks)])
        axes.set_ylim(panel.ranks, 0)
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds))
        axes.tick_params(labelbottom=True, labelsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("time, the same scale for all strategies", fontsize="small")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles[: len(NAMES)], labels[: len(NAMES)], loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _draw_rank(axes: Any, rank: int, begin: float, timeline: Timeline, longest: float) -> None:
    """Draw the lanes of a rank in one pass; labels are drawn where they have room."""
    for kind, color in COLORS.items():
        spans = [span for span in timeline.by_rank[rank % timeline.period].spans if span.kind == kind]
        bars = [(begin + span.start, span.end - span.start) for span in spans]
        lane = (rank + 0.45, 0.4) if kind == "transfer" else (rank + 0.05, 0.4)
        edge = 0.3 if all(length > ROOM / 20 * longest for _, length in bars) else 0.0
        axes.broken_barh(bars, lane, facecolor=color, edgecolor="white", linewidth=edge, label=NAMES[kind])
        last = -longest
        for span in spans if rank < timeline.period else ():  # the others only take as long
            middle = begin + (span.start + span.end) / 2
            if span.end - span.start > ROOM * longest and middle - last > ROOM * longest:
                axes.text(middle, lane[0] + lane[1] / 2, span.label, fontsize=7, ha="center", va="center")
                last = middle
