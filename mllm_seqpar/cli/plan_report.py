"""A plan as a text for people, as a mapping for programs, and one layer of it as a figure."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner.call_cost import MARGIN, AttentionCall, duration
from mllm_seqpar.planner.cluster import Passes
from mllm_seqpar.planner.memory import USABLE
from mllm_seqpar.planner.plan import Plan, StrategyPlan, simulated_cluster
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.schedules.mesh_shapes import TILE_STRATEGIES, ParallelSpec

_NAMES = {"lv-xattn": "LV-XAttn", "ring": "Ring Attention"}

WIDTH = 100
"""The longest line of a plan as text."""


def as_text(plan: Plan) -> str:
    """Return a heading, a table with a column for each strategy, and the best one with the reason; lines of WIDTH."""
    return "\n".join([*_wrapped(_heading(plan)), "", *_table(plan), "", *_wrapped(_verdict(plan))])


def _wrapped(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of texts. Those after the first of a text are indented, by more if the text is."""
    for text in texts:
        indent = "    " if text.startswith(" ") else "  "
        yield from textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain numbers and strings, in seconds and bytes, and hours of a data set."""
    best, workload = plan.best, plan.workload

    def shape(spec: ParallelSpec) -> dict[str, Any]:
        return {"tile": list(spec.mesh_shape), "heads_over": spec.head_degree}

    def seconds(passes: Passes) -> dict[str, float]:
        return {"forward": passes.forward.seconds, "backward": passes.backward.seconds}

    def part(passes: Passes) -> dict[str, float]:
        return seconds(passes) | {name: value for name, value in vars(passes.both).items() if name != "seconds"}

    def strategy(row: StrategyPlan) -> dict[str, Any]:
        return {
            "strategy": row.spec.strategy,
            **shape(row.spec),
            "seconds": row.seconds,
            **seconds(row),
            "parts": {name: part(passes) for name, passes in row.parts.items()},
            "memory": dict(row.memory),
            "memory_total": row.memory_total,
            "fits": row.fits,
            "longest_frames": row.max_frames,
            "cores_per_gpu": plan.cores_per_gpu(row),
        }

    values: dict[str, Any] = {
        "run": asdict(workload),
        "cluster": asdict(plan.cluster),
        "best": {
            "strategy": best.spec.strategy,
            "tile": list(best.spec.mesh_shape),
            "patch_model": patch_options(plan),
            "why": " ".join(reasons(plan)),
        },
        "enough_gpus": plan.min_gpus,
        "self_attention": shape(plan.text),
        "strategies": [strategy(row) for row in plan.rows],
        "not legal": dict(plan.illegal),
    }
    if workload.samples is not None:
        hours = plan.hours(best)
        totals = {"steps": workload.steps, "hours": hours, "gpu_hours": hours * workload.gpus}
        values["data_set"] = {"samples": workload.samples, "epochs": workload.epochs, **totals}
    return values


def patch_options(plan: Plan) -> dict[str, Any]:
    """Return the options of `patch_model` that run the best row, without options at their default."""
    workload, spec = plan.workload, plan.best.spec
    options: dict[str, Any] = {} if workload.model.decoder_only else {"strategy": spec.strategy}
    self_attention = spec.strategy if workload.model.decoder_only else workload.self_attention
    if workload.gpus > 1 and self_attention != "ring":
        options["self_attention"] = self_attention
    if _needs_tile(spec):
        options["tile"] = spec.mesh_shape
    elif spec.strategy not in TILE_STRATEGIES and workload.self_attention != "auto" and _needs_tile(plan.text):
        options["tile"] = plan.text.mesh_shape
    return options | _shared_options(workload)


def _shared_options(workload: Workload) -> dict[str, Any]:
    """Return the options of `patch_model` that all rows have in common, without options at their default."""
    options: dict[str, Any] = {}
    names = ("recompute", "recompute_attention", "overlap", "mlp_chunk_size", "vision_chunk_size", "visual_offload")
    for name in names:
        value = getattr(workload, name)
        if value != getattr(Workload, name):
            options["recompute_visual" if name == "recompute" else name] = value
    return options


def _needs_tile(spec: ParallelSpec) -> bool:
    """Return whether the option `tile` has to be passed to run this spec."""
    return spec.strategy == "mesh" or (spec.strategy == "ulysses" and spec.mesh_shape != (1, 1))


def _heading(plan: Plan) -> list[str]:
    """Return what is planned, on which cluster, and what is assumed, each in a paragraph."""
    workload, cluster, model, vision = plan.workload, plan.cluster, plan.workload.model, plan.workload.model.vision
    what, parameters = workload.trained, f"parameters of {workload.parameter}"
    if workload.lora_r is not None:
        targets = [name for name in workload.lora_target if name != "cross" or not model.decoder_only]
        what = f"LoRA of rank {workload.lora_r} on {', '.join(targets)}"
        stored = workload.base_parameter or workload.element
        parameters = f"frozen weights of {stored}, adapters of {workload.parameter}"
    where = "on every GPU" if workload.answer and not workload.shard_weights else "sharded by FSDP2"
    assumptions = [f"activations of {workload.element} bytes, {parameters}, {where}"]
    if workload.training:
        assumptions[0] += f", gradients of {workload.parameter}, optimizer {workload.optimizer} bytes each"
        again = "attention computed again" if workload.recompute_attention else "results of attention kept"
        with_, without = f"with gradient checkpointing, {again}", "no gradient checkpointing"
        assumptions.append(with_ if workload.checkpointing else without)
    if not model.decoder_only:
        local = workload.self_attention == "local"
        assumptions.append(f"self-attention {'local' if local else plan.text}")
    tokens, sizes = f"{vision.keys}", workload.frame_tokens
    if sizes is not None:
        tokens = f"{min(sizes)} to {max(sizes)} (mean {sum(sizes) / len(sizes):.4g})"
    video = f"{workload.frames:,} frames of {tokens} tokens"
    if vision.temporal_patch > 1:
        video = f"{workload.frames:,} frames, {tokens} tokens for every {vision.temporal_patch} of them"
    peak = f" ({cluster.attention_forward / cluster.peak_flops:.0%} of peak)" if cluster.peak_flops else ""
    return [
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {workload.trained_parameters / 1e9:.3g} B trained "
        f"({what}); {video}, {workload.text:,} text tokens" + (f", batch {workload.batch}" * (workload.batch > 1)),
        f"{workload.gpus} GPUs of {cluster.name}: attention {cluster.attention_forward / 1e12:.4g} TFLOP/s forward"
        f"{peak}, {cluster.gpus_per_node} to a node at {cluster.node_link / 1e9:.4g} GB/s, "
        f"{cluster.network_link / 1e9:.4g} GB/s between nodes",
        "; ".join(assumptions),
    ]


def _table(plan: Plan) -> list[str]:
    """Return the table with a column for each strategy, the best one first; each cell has its unit."""
    rows = [plan.best, *(row for row in plan.rows if row is not plan.best)]
    lines: list[list[str]] = []

    def add(name: str, cells: Iterable[str] = ()) -> None:
        lines.append([name, *(cells or [""] * len(rows))])

    answer, usable = plan.workload.answer, _bytes(USABLE * plan.cluster.memory_bytes)
    add("", (str(row.spec).partition(" ")[0] for row in rows))
    add("", (str(row.spec).partition(" ")[2] for row in rows))
    if answer:
        add(f"time of an answer of {answer:,} tokens", (duration(row.seconds) for row in rows))
        add("  each token", (duration(row.parts["decoding"].seconds / answer) for row in rows))
    else:
        add("time of a step", (duration(row.seconds) for row in rows))
        add("  forward, of all parts", (duration(row.forward.seconds) for row in rows))
        add("  backward", (duration(row.backward.seconds) for row in rows))
    for part in rows[0].parts:
        name = "waiting for parameters" if part == "parameters" else part
        add(f"  {name}", (duration(row.parts[part].seconds) for row in rows))
    add("transfers of attention")
    kinds = [kind for kind in ("cross", "self") if f"{kind}-attention" in rows[0].parts]
    for kind in kinds:
        part = f"{kind}-attention"
        add(f"  {kind}, waited for", (duration(row.parts[part].exposed) for row in rows))
        add(f"  {kind}, overlapped", (duration(row.parts[part].both.hidden) for row in rows))
    add("data, cores for each GPU", (f"{plan.cores_per_gpu(row):.3g}" for row in rows))
    add("bytes sent by the busiest GPU")
    compared = plan.workload.compared
    add(f"  {kinds[0]}, within the node", (_bytes(row.parts[compared].both.node_bytes) for row in rows))
    add(f"  {kinds[0]}, to other nodes", (_bytes(row.parts[compared].both.network_bytes) for row in rows))
    add("  all parts, to other nodes", (_bytes(row.both.network_bytes) for row in rows))
    add("memory of a GPU at the peak", (_bytes(row.memory_total) for row in rows))
    for kind in rows[0].memory:
        add(f"  {kind}", (_bytes(row.memory[kind]) for row in rows))
    add(f"  fits into {usable}", ("yes" if row.fits else "no" for row in rows))
    if plan.workload.visual_offload:
        add("features of a rank in host memory", (_bytes(plan.workload.features_bytes) for _ in rows))
    add("longest video, in frames", (f"{row.max_frames:,}" for row in rows))
    left, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    return [
        "  ".join([name.ljust(left), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))]).rstrip()
        for name, *cells in lines
    ]


def reasons(plan: Plan) -> list[str]:
    """Return sentences that say why the best row is the best: faster and equal ones, memory, and the next ones."""
    best, part = plan.best, plan.workload.compared
    if not best.fits:
        least, usable = min(plan.rows, key=lambda row: row.memory_total), _bytes(USABLE * plan.cluster.memory_bytes)
        return [f"{least.spec} needs the least memory: {_bytes(least.memory_total)} of a GPU, of {usable}."]
    sentences, others = [], [row for row in plan.rows if row is not best]
    equal = [row for row in others if row.fits and row.seconds <= best.seconds * (1 + MARGIN)]
    if equal:
        names = ", ".join(f"{row.spec} ({_bytes(row.memory_total)})" for row in equal)
        prefers = f", and {_NAMES[plan.preferred]} is preferred among equals"
        sentences.append(
            f"Equal within {MARGIN:.0%}{prefers if best.spec.strategy == plan.preferred else ''}: {names}; {best.spec} "
            f"needs {_bytes(best.memory_total)} of a GPU."
        )
    for row in others:
        if row.fits and row not in equal:
            more = row.parts[part].exposed - best.parts[part].exposed
            waits = more > (row.seconds - best.seconds) / 2
            cause = f": {duration(more)} more of transfers that computation does not hide" if waits else ""
            sentences.append(f"{row.spec} takes {row.seconds / best.seconds:.3g} times as long{cause}.")
        elif not row.fits and row.seconds < best.seconds:
            needs = f"but needs {_bytes(row.memory_total)} of a GPU"
            sentences.append(f"{row.spec} would take {duration(row.seconds)}, {needs}.")
    if others and not sentences:
        return ["No other strategy fits."]
    return sentences or ["No other strategy was compared."]


def _verdict(plan: Plan) -> Iterator[str]:
    """Yield the best strategy with its options and the reasons, and the hours of a data set."""
    workload, best, enough = plan.workload, plan.best, plan.min_gpus
    for name, reason in plan.illegal.items():
        yield f"{name}: left out, {reason}"
    if best.fits:
        options = "".join(f", {name}={value!r}" for name, value in patch_options(plan).items())
        yield f"Best: {best.spec}, {duration(best.seconds)} {'an answer' if workload.answer else 'a step'}"
        yield f"  patch_model(model{options})"
        yield from (f"  {reason}" for reason in reasons(plan))
        if enough and enough < workload.gpus:
            yield f"With {_NAMES[plan.preferred]}, {enough} GPUs are enough."
    else:
        most = max(row.max_frames for row in plan.rows)
        frames = f"at most {most:,} frames fit" if most else "not even one frame fits"
        gpus = f"{enough} GPUs are enough" if enough else "no number of GPUs is enough"
        yield f"Nothing fits with {workload.frames:,} frames; {frames}; {gpus}."
        yield from reasons(plan)
        if options := ", ".join(f"{name}={value!r}" for name, value in _shared_options(workload).items()):
            yield f"All strategies are planned with {options}."
    two = not workload.model.decoder_only and workload.self_attention != "auto"
    if _needs_tile(best.spec) and _needs_tile(plan.text) and two:
        yield f"patch_model takes one tile, but the plan has {best.spec} for frames and {plan.text} for text."
    if workload.samples is None:
        return
    epochs = f" x {workload.epochs:g} epochs" if workload.epochs != 1 else ""
    kind = "steps" if workload.training else "forward passes"
    steps = f"{workload.steps:,} {kind} of {workload.batch} on {workload.gpus} GPUs"
    yield f"{workload.samples:,} samples{epochs} in {steps}:"
    named = {row.spec.strategy: row for row in plan.rows if row.fits and row is not best}
    for row in (best, *(named[name] for name in dict.fromkeys((plan.preferred, "ring")) if name in named)):
        hours = plan.hours(row)
        total, all_gpus = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (hours, hours * workload.gpus))
        days = f" ({hours / 24:.1f} days)" if hours >= 48 else ""
        yield f"  {row.spec}: {total} hours{days}, {all_gpus} GPU-hours"


def _bytes(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B" if size else "0"


# The figure: a lane of computing and waiting above a lane of sending for each rank. Operations before and after a
# schedule (all-to-all, gathering of features, projections) are not drawn.
KINDS = {
    "compute": ("#4c78a8", "computes blocks"),
    "wait": ("#e45756", "waits for a transfer"),
    "transfer": ("#72b7b2", "sends"),
}
MAX_RANKS = 8


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw one cross-attention layer, or decoder layer of a decoder-only model, to a file, whose suffix chooses the
    format.

    The best strategy is on top, and LV-XAttn and Ring Attention are below it on the same time axis, if the plan
    compares them. A strategy has at most MAX_RANKS ranks.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--timeline needs matplotlib; install mllm-seqpar[plot]") from error
    workload, by_name = plan.workload, {row.spec.strategy: row for row in plan.rows}
    compared = [by_name[name] for name in ("lv-xattn", "ring") if name in by_name and by_name[name] is not plan.best]
    specs = [row.spec for row in (plan.best, *compared)]
    problem, visible = workload.problem(workload.compared), workload.visible(workload.compared)
    ranks, cluster = min(problem.ranks, MAX_RANKS), simulated_cluster(workload, plan.cluster)
    figure = Figure(figsize=(11, 1.4 + len(specs) * (0.4 * ranks + 0.7)), layout="constrained")
    figure.suptitle(
        f"One {workload.compared} layer of {workload.model.name}: {workload.frames:,} frames, {workload.text:,} text "
        f"tokens, {workload.gpus} GPUs of {plan.cluster.name}",
        fontsize="medium",
        fontweight="bold",
    )
    all_axes, longest = figure.subplots(len(specs), 1, sharex=True, squeeze=False)[:, 0], 0.0
    for axes, spec in zip(all_axes, specs, strict=True):
        begin, title = 0.0, []
        for name, backward in [("forward", False), ("backward", True)][: 2 if workload.training else 1]:
            timelines = AttentionCall(problem, spec, cluster, backward=backward, visible=visible).timelines()
            for rank in range(ranks):
                for kind, (color, label) in KINDS.items():
                    spans = [span for span in timelines[rank % len(timelines)].spans if span[0] == kind]
                    bars = [(begin + start, end - start) for _, start, end in spans]
                    lane = (rank + (0.45 if kind == "transfer" else 0.05), 0.4)
                    axes.broken_barh(bars, lane, facecolor=color, edgecolor="white", linewidth=0.1, label=label)
            seconds = max(timeline.seconds for timeline in timelines)
            title.append(f"{name} {duration(seconds)}")
            begin += seconds
            axes.axvline(begin, color="#888888", linewidth=0.8)
        longest = max(longest, begin)
        more = f" ({problem.ranks - ranks} more ranks are not drawn)" if problem.ranks > ranks else ""
        axes.set_title(f"{spec}: {', '.join(title)}{more}", loc="left", fontsize="small")
        axes.set_yticks([rank + 0.45 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
        axes.set_ylim(ranks, 0)
        axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    all_axes[0].set_xlim(0, longest)
    all_axes[-1].set_xlabel("time, the same scale for all strategies", fontsize="small")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles[: len(KINDS)], labels[: len(KINDS)], loc="outside lower center", ncols=3, fontsize="small")
    try:
        figure.savefig(path, bbox_inches="tight", dpi=150)
    except ValueError as error:  # an unknown suffix
        raise ConfigError(f"--timeline {path}: {error}") from error
