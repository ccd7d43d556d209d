"""A plan as a text for people and as a mapping for programs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from .candidates import ParallelSpec
from .memory import KINDS, USABLE
from .offload import host_bytes
from .plan import Plan, StrategyPlan
from .selection import Candidate
from .step_cost import PARTS
from .workload import Workload


def as_text(plan: Plan) -> str:
    """Return a heading, tables of times, transfers and memory, and the best strategy."""
    passes, size = "forward + backward" if plan.workload.training else "forward", plan.cluster.memory_bytes / 1e9
    kinds = ["cross exposed", "hidden", "self exposed", "hidden", "cross GB in node", "network", "network of all parts"]
    return "\n".join(
        [
            *_heading(plan),
            "",
            f"Seconds of a step, {passes}; parameters: the wait for them",
            *_table(plan, _times, ["step", "forward", "backward", *PARTS]),
            "",
            "Transfers of attention in seconds; bytes of the GPU that sends most in a step",
            *_table(plan, _transfers, kinds),
            "",
            f"GB of a GPU at the peak (of {size:.0f}; {USABLE:.0%} may be filled); longest video with the same text",
            *_table(plan, _memory, ["total", *KINDS, "fits", "longest video"]),
            "",
            *_verdict(plan),
        ]
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain numbers and strings, in seconds and bytes."""
    best, text = plan.best.spec, plan.text
    return {
        "run": asdict(plan.workload),
        "cluster": asdict(plan.cluster),
        "best": {"strategy": best.strategy, "tile": list(best.mesh_shape), "patch_model": patch_options(plan)},
        "enough_gpus": plan.min_gpus,
        "self_attention": {**_shape_json(text.spec), "call": _call_json(text)},
        "strategies": [_row_json(row) for row in plan.rows],
        "not legal": dict(plan.illegal),
    }


def _row_json(row: StrategyPlan) -> dict[str, Any]:
    return {
        "strategy": row.spec.strategy,
        **_shape_json(row.spec),
        **{name: getattr(row, name) for name in ("seconds", "forward", "backward")},
        "parts": {name: asdict(row.parts[name]) for name in PARTS},
        "memory": dict(row.memory),
        "memory_total": sum(row.memory.values()),
        "fits": row.fits,
        "longest_frames": row.max_frames,
        "cross_attention_call": _call_json(row.cross),
    }


def _shape_json(spec: ParallelSpec) -> dict[str, Any]:
    return {"tile": list(spec.mesh_shape), "heads_over": spec.head_degree}


def _call_json(candidate: Candidate) -> dict[str, dict[str, Any]]:
    passes = zip(("forward", "backward"), candidate.passes, strict=False)
    return {name: {k: v for k, v in vars(cost).items() if k != "timeline"} for name, cost in passes}


def patch_options(plan: Plan) -> dict[str, Any]:
    """Return the options of `patch_model` that run the best row, without options at their default."""
    workload, spec = plan.workload, plan.best.spec
    options: dict[str, Any] = {"strategy": spec.strategy}
    if workload.gpus > 1 and workload.self_attention != "ring":
        options["self_attention"] = workload.self_attention
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
        what = f"LoRA of rank {workload.lora_r} on {', '.join(workload.lora_target)}"
        parameters = (
            f"frozen weights of {workload.base_parameter or workload.element}, adapters of {workload.parameter}"
        )
    assumptions = [f"activations of {workload.element} bytes, {parameters}, sharded by FSDP2"]
    if workload.training:
        assumptions[0] += f", gradients of {workload.parameter}, optimizer {workload.optimizer} bytes each"
        assumptions.append("K and V of frames " + ("recomputed in backward" if workload.recompute else "saved"))
        kept = ", attention computed again" if workload.recompute_attention else ", results of attention kept"
        assumptions.append(
            "with gradient checkpointing" + kept if workload.checkpointing else "no gradient checkpointing"
        )
    if workload.visual_offload:
        assumptions.append(f"features in host memory, {host_bytes(workload) / 1e9:.3g} GB of a rank")
    if workload.mlp_chunk_size is not None:
        assumptions.append(f"MLPs of {workload.mlp_chunk_size} tokens at once")
    self_attention = "local" if workload.self_attention == "local" else str(plan.text.spec)
    return [
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {workload.trained_parameters / 1e9:.3g} B trained "
        f"({what}); {workload.frames} frames of {model.vision.keys} tokens, {workload.text} text tokens" + batch,
        f"{workload.gpus} GPUs of {cluster.name}: attention {cluster.attention_forward / 1e12:.4g} TFLOP/s forward"
        f"{peak}, {cluster.gpus_per_node} to a node at {cluster.node_link / 1e9:.4g} GB/s, "
        f"{cluster.network_link / 1e9:.4g} GB/s between nodes",
        "; ".join([*assumptions, f"self-attention {self_attention}"]),
    ]


def _times(row: StrategyPlan) -> list[str]:
    return [*map(_seconds, (row.seconds, row.forward, row.backward, *(row.parts[name].seconds for name in PARTS)))]


def _transfers(row: StrategyPlan) -> list[str]:
    cross, text = row.parts["cross-attention"], row.parts["self-attention"]
    network = sum(part.network_bytes for part in row.parts.values())
    seconds = map(_seconds, (cross.exposed, cross.hidden, text.exposed, text.hidden))
    return [*seconds, *map(_gigabytes, (cross.node_bytes, cross.network_bytes, network))]


def _memory(row: StrategyPlan) -> list[str]:
    sizes = (sum(row.memory.values()), *(row.memory[kind] for kind in KINDS))
    return [*map(_gigabytes, sizes), "yes" if row.fits else "no", f"{row.max_frames} frames"]


def _verdict(plan: Plan) -> list[str]:
    workload, best = plan.workload, plan.best
    lines = [f"{name}: left out, {reason}" for name, reason in plan.illegal.items()]
    if best.fits:
        options = ", ".join(f"{name}={value!r}" for name, value in patch_options(plan).items())
        lines.append(f"Best: {best.spec}, {_seconds(best.seconds)} s a step: patch_model(model, {options})")
        if plan.min_gpus and plan.min_gpus < workload.gpus:
            lines.append(f"With LV-XAttn, {plan.min_gpus} GPUs are enough.")
    else:
        most = max(row.max_frames for row in plan.rows)
        frames = f"at most {most} frames fit" if most else "not even one frame fits"
        gpus = f"{plan.min_gpus} GPUs are enough" if plan.min_gpus else "no number of GPUs is enough"
        lines.append(f"Nothing fits with {workload.frames} frames; {frames}; {gpus}.")
    if _needs_tile(best.spec) and _needs_tile(plan.text.spec) and workload.self_attention != "auto":
        lines.append(
            f"patch_model takes one tile, but the plan has {best.spec} for frames and {plan.text.spec} for text."
        )
    if workload.frames > workload.text:
        lines.append(
            f"{workload.frames} frames need as many placeholders in the text, which has only {workload.text} tokens: "
            "pass a larger --text."
        )
    return lines


def _table(plan: Plan, cells: Callable[[StrategyPlan], list[str]], names: Sequence[str]) -> list[str]:
    """Return a table with a line per strategy; the first column is aligned to the left, the others to the right."""
    rows = [["strategy", *names], *([str(row.spec), *cells(row)] for row in plan.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _seconds(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _gigabytes(size: float) -> str:
    size /= 1e9
    return "0" if size == 0 else f"{size:.2g}" if size < 1 else f"{size:.1f}" if size < 1000 else f"{size:.0f}"
