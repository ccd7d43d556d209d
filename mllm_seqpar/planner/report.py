"""A plan as a text for people and as a mapping for programs."""

import textwrap
from dataclasses import asdict
from typing import Any

from .call_cost import MARGIN, CallCost, Candidate, ParallelSpec, duration
from .cluster import Cost, Passes
from .memory import USABLE
from .plan import DataSet, Plan, StrategyPlan
from .workload import Workload

_NAMES = {"lv-xattn": "LV-XAttn", "ring": "Ring Attention"}

WIDTH = 100
"""The longest line of a plan as text."""


def as_text(plan: Plan, data_set: DataSet | None = None) -> str:
    """Return a heading, a table with a column for each strategy, and the best one with the reason; lines of WIDTH."""
    lines = [*_heading(plan), "", *_table(plan), "", *_verdict(plan)]
    if data_set is not None:
        lines += _duration(plan, data_set)
    return "\n".join(lines)


def as_json(plan: Plan, data_set: DataSet | None = None) -> dict[str, Any]:
    """Return the plan as plain numbers and strings, in seconds and bytes, and hours of a data set."""
    best, text = plan.best.spec, plan.text
    values: dict[str, Any] = {
        "run": asdict(plan.workload),
        "cluster": asdict(plan.cluster),
        "best": {
            "strategy": best.strategy,
            "tile": list(best.mesh_shape),
            "patch_model": patch_options(plan),
            "why": " ".join(reasons(plan)),
        },
        "enough_gpus": plan.min_gpus,
        "self_attention": {**_shape_json(text.spec), "call": _call_json(text)},
        "strategies": [
            _row_json(row, plan.workload.compared) | {"cores_per_gpu": plan.cores_per_gpu(row)} for row in plan.rows
        ],
        "not legal": dict(plan.illegal),
    }
    if data_set is not None:
        steps, hours = data_set.steps(plan.workload.batch), data_set.hours(plan.workload.batch, plan.best.seconds)
        values["data_set"] = {**asdict(data_set), "steps": steps, "hours": hours}
        values["data_set"] |= {"gpu_hours": hours * plan.workload.gpus}
    return values


def _row_json(row: StrategyPlan, attention: str) -> dict[str, Any]:
    return {
        "strategy": row.spec.strategy,
        **_shape_json(row.spec),
        "seconds": row.seconds,
        **_seconds(row),
        "parts": {name: _seconds(part) | _transfers(part.both) for name, part in row.parts.items()},
        "memory": dict(row.memory),
        "memory_total": sum(row.memory.values()),
        "fits": row.fits,
        "longest_frames": row.max_frames,
        f"{attention.replace('-', '_')}_call": _call_json(row.call),
    }


def _shape_json(spec: ParallelSpec) -> dict[str, Any]:
    return {"tile": list(spec.mesh_shape), "heads_over": spec.head_degree}


def _call_json(candidate: Candidate) -> dict[str, dict[str, Any]]:
    passes = {"forward": candidate.forward, "backward": candidate.backward}
    calls = {name: cost for name, cost in passes.items() if isinstance(cost, CallCost)}
    return {name: {k: v for k, v in vars(cost).items() if k != "timeline"} for name, cost in calls.items()}


def _seconds(cost: Passes) -> dict[str, float]:
    return {"forward": cost.forward.seconds, "backward": cost.backward.seconds}


def _transfers(cost: Cost) -> dict[str, float]:
    return {name: value for name, value in asdict(cost).items() if name != "seconds"}


def patch_options(plan: Plan) -> dict[str, Any]:
    """Return the options of `patch_model` that run the best row, without options at their default."""
    workload, spec = plan.workload, plan.best.spec
    options: dict[str, Any] = {} if workload.model.decoder_only else {"strategy": spec.strategy}
    self_attention = spec.strategy if workload.model.decoder_only else workload.self_attention
    if workload.gpus > 1 and self_attention != "ring":
        options["self_attention"] = self_attention
    if _needs_tile(spec):
        options["tile"] = spec.mesh_shape
    elif spec.strategy not in ("mesh", "ulysses") and workload.self_attention != "auto" and _needs_tile(plan.text.spec):
        options["tile"] = plan.text.spec.mesh_shape
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
    workload, cluster, model = plan.workload, plan.cluster, plan.workload.model
    peak = f" ({cluster.attention_forward / cluster.peak_flops:.0%} of peak)" if cluster.peak_flops else ""
    batch = f", batch {workload.batch}" if workload.batch > 1 else ""
    what, parameters = workload.trained, f"parameters of {workload.parameter}"
    if workload.lora_r is not None:
        what = f"LoRA of rank {workload.lora_r} on {', '.join(_targets(workload))}"
        parameters = (
            f"frozen weights of {workload.base_parameter or workload.element}, adapters of {workload.parameter}"
        )
    where = "on every GPU" if workload.answer and not workload.shard_weights else "sharded by FSDP2"
    assumptions = [f"activations of {workload.element} bytes, {parameters}, {where}"]
    if workload.training:
        assumptions[0] += f", gradients of {workload.parameter}, optimizer {workload.optimizer} bytes each"
        if not model.decoder_only:
            assumptions.append("K and V of frames " + ("recomputed in backward" if workload.recompute else "saved"))
        kept = ", attention computed again" if workload.recompute_attention else ", results of attention kept"
        assumptions.append(
            "with gradient checkpointing" + kept if workload.checkpointing else "no gradient checkpointing"
        )
    if workload.visual_offload:
        assumptions.append(f"features in host memory, {workload.features_bytes / 1e9:.3g} GB of a rank")
    if workload.mlp_chunk_size is not None:
        assumptions.append(f"MLPs of {workload.mlp_chunk_size} tokens at once")
    if not model.decoder_only:
        self_attention = "local" if workload.self_attention == "local" else str(plan.text.spec)
        assumptions.append(f"self-attention {self_attention}")
    paragraphs = [
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {workload.trained_parameters / 1e9:.3g} B trained "
        f"({what}); {_video(workload)}, {workload.text:,} text tokens" + batch,
        f"{workload.gpus} GPUs of {cluster.name}: attention {cluster.attention_forward / 1e12:.4g} TFLOP/s forward"
        f"{peak}, {cluster.gpus_per_node} to a node at {cluster.node_link / 1e9:.4g} GB/s, "
        f"{cluster.network_link / 1e9:.4g} GB/s between nodes",
        "; ".join(assumptions),
    ]
    return [line for paragraph in paragraphs for line in _wrapped(paragraph)]


def _targets(workload: Workload) -> list[str]:
    """Return the layers with adapters, without those that the model lacks."""
    return [name for name in workload.lora_target if name != "cross" or not workload.model.decoder_only]


def _video(workload: Workload) -> str:
    vision = workload.model.vision
    if vision.temporal_patch == 1:
        return f"{workload.frames:,} frames of {vision.keys} tokens"
    return f"{workload.frames:,} frames, {vision.keys} tokens for every {vision.temporal_patch} of them"


def _cells(row: StrategyPlan, usable: float, cores: float, answer: int) -> dict[str, str]:
    """Return the column of a strategy: a cell with its unit by the name of the line."""
    kinds = {name: row.parts[f"{name}-attention"] for name in ("cross", "self") if f"{name}-attention" in row.parts}
    first, part = next(iter(kinds.items()))
    names = {name: f"  {name}" for name in row.parts} | {"parameters": "  waiting for parameters"}
    if "decoding" in row.parts:
        cells = {f"time of an answer of {answer:,} tokens": duration(row.seconds)}
        cells |= {"  each token": duration(row.parts["decoding"].seconds / answer)}
    else:
        cells = {"time of a step": duration(row.seconds)}
        cells |= {
            "  forward, of all parts": duration(row.forward.seconds),
            "  backward": duration(row.backward.seconds),
        }
    cells |= {names[name]: duration(row.parts[name].seconds) for name in row.parts}
    cells["transfers of attention"] = ""
    for name, each in kinds.items():
        cells |= {f"  {name}, waited for": duration(each.exposed), f"  {name}, overlapped": duration(each.both.hidden)}
    cells["data, cores for each GPU"] = f"{cores:.3g}"
    cells["bytes sent by the busiest GPU"] = ""
    cells |= {
        f"  {first}, within the node": _bytes(part.both.node_bytes),
        f"  {first}, to other nodes": _bytes(part.both.network_bytes),
    }
    cells["  all parts, to other nodes"] = _bytes(row.both.network_bytes)
    cells["memory of a GPU at the peak"] = _bytes(sum(row.memory.values()))
    cells |= {f"  {kind} ": _bytes(size) for kind, size in row.memory.items()}
    cells[f"  fits into {_bytes(usable)}"] = "yes" if row.fits else "no"
    cells["longest video, in frames"] = f"{row.max_frames:,}"
    return cells


def _table(plan: Plan) -> list[str]:
    """Return the table with a column for each strategy, the best one first."""
    rows = [plan.best, *(row for row in plan.rows if row is not plan.best)]
    usable, answer = USABLE * plan.cluster.memory_bytes, plan.workload.answer
    columns = [_cells(row, usable, plan.cores_per_gpu(row), answer) for row in rows]
    heads = [str(row.spec).partition(" ") for row in rows]
    names = ["", "", *columns[0]]
    body = [[head[0], head[2], *cells.values()] for head, cells in zip(heads, columns, strict=True)]
    left, widths = max(map(len, names)), [max(map(len, cells)) for cells in body]
    lines = zip(names, zip(*body, strict=True), strict=True)
    return [
        "  ".join([name.rstrip().ljust(left), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))]).rstrip()
        for name, cells in lines
    ]


def reasons(plan: Plan) -> list[str]:
    """Return sentences that say why the best row is the best: faster and equal ones, memory, and the next ones."""
    best, usable = plan.best, USABLE * plan.cluster.memory_bytes
    others = [row for row in plan.rows if row is not best]
    if not best.fits:
        least = min(plan.rows, key=_total)
        return [f"{least.spec} needs the least memory: {_bytes(_total(least))} of a GPU, of {_bytes(usable)}."]
    equal = [row for row in others if row.fits and row.seconds <= best.seconds * (1 + MARGIN)]
    slower = [row for row in others if row.fits and row not in equal]
    unfit = [row for row in others if not row.fits and row.seconds < best.seconds]
    said = []
    if equal:
        names = ", ".join(f"{row.spec} ({_bytes(_total(row))})" for row in equal)
        prefers = f", and {_NAMES[plan.preferred]} is preferred among equals"
        prefers = prefers if best.spec.strategy == plan.preferred else ""
        said.append(f"Equal within {MARGIN:.0%}{prefers}: {names}; {best.spec} needs {_bytes(_total(best))} of a GPU.")
    for row in slower:
        more = row.parts[plan.workload.compared].exposed - best.parts[plan.workload.compared].exposed
        waits = more > (row.seconds - best.seconds) / 2
        cause = f": {duration(more)} more of transfers that computation does not hide" if waits else ""
        said.append(f"{row.spec} takes {row.seconds / best.seconds:.3g} times as long{cause}.")
    for row in unfit:
        said.append(f"{row.spec} would take {duration(row.seconds)}, but needs {_bytes(_total(row))} of a GPU.")
    return said or ["No other strategy was compared."]


def _verdict(plan: Plan) -> list[str]:
    workload, best = plan.workload, plan.best
    lines = [f"{name}: left out, {reason}" for name, reason in plan.illegal.items()]
    if best.fits:
        options = "".join(f", {name}={value!r}" for name, value in patch_options(plan).items())
        lines += [
            f"Best: {best.spec}, {duration(best.seconds)} {'an answer' if workload.answer else 'a step'}",
            f"  patch_model(model{options})",
        ]
        lines += [line for reason in reasons(plan) for line in _wrapped(f"  {reason}", "  ")]
        if plan.min_gpus and plan.min_gpus < workload.gpus:
            lines.append(f"With {_NAMES[plan.preferred]}, {plan.min_gpus} GPUs are enough.")
    else:
        most = max(row.max_frames for row in plan.rows)
        frames = f"at most {most:,} frames fit" if most else "not even one frame fits"
        gpus = f"{plan.min_gpus} GPUs are enough" if plan.min_gpus else "no number of GPUs is enough"
        lines.append(f"Nothing fits with {workload.frames:,} frames; {frames}; {gpus}.")
        lines += [line for reason in reasons(plan) for line in _wrapped(reason)]
    two = not workload.model.decoder_only and workload.self_attention != "auto"
    if _needs_tile(best.spec) and _needs_tile(plan.text.spec) and two:
        text = f"patch_model takes one tile, but the plan has {best.spec} for frames and {plan.text.spec} for text."
        lines += _wrapped(text)
    return lines


def _duration(plan: Plan, data_set: DataSet) -> list[str]:
    """Return the hours of a data set with the best strategy, and with the two others that fit and are compared most."""
    workload, batch = plan.workload, plan.workload.batch
    named = {row.spec.strategy: row for row in plan.rows if row.fits}
    rows = [
        plan.best,
        *(named[name] for name in (plan.preferred, "ring") if name in named and named[name] is not plan.best),
    ]
    epochs = f" x {data_set.epochs:g} epochs" if data_set.epochs != 1 else ""
    kind = "steps" if workload.training else "forward passes"
    lines = _wrapped(
        f"{data_set.samples:,} samples{epochs} in {data_set.steps(batch):,} {kind} of {batch} on {workload.gpus} GPUs:"
    )
    for row in rows:
        hours = data_set.hours(batch, row.seconds)
        lines.append(f"  {row.spec}: {_hours(hours)}, {_number(hours * workload.gpus)} GPU-hours")
    return lines


def _hours(hours: float) -> str:
    days = f" ({hours / 24:.1f} days)" if hours >= 48 else ""
    return f"{_number(hours)} hours{days}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _total(row: StrategyPlan) -> int:
    return sum(row.memory.values())


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="", subsequent_indent=indent + "  ", break_long_words=False)


def _bytes(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B" if size else "0"
