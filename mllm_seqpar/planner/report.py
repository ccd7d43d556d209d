"""A plan as text for people and as a mapping for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .call_cost import CallCost
from .candidates import ParallelSpec
from .memory import KINDS, USABLE
from .plan import Plan, StrategyPlan
from .step_cost import PARTS
from .workload import Workload


def table(plan: Plan) -> str:
    """The plan as text: what is planned, a table of times and transfers, a table of memory, the verdict."""
    kind, size = "forward + backward" if plan.run.training else "forward", plan.cluster.memory_bytes / 1e9
    return "\n".join(
        [
            _heading(plan),
            "",
            f"Seconds of a step, {kind}; parameters: the wait for them",
            *_columns(_times(plan)),
            "",
            "Transfers of attention in seconds; bytes of the GPU that sends most in a step",
            *_columns(_transfers(plan)),
            "",
            f"GB of a GPU at the peak (of {size:.0f}; {USABLE:.0%} may be filled); longest video with the same text",
            *_columns(_memory(plan)),
            "",
            *_verdict(plan),
        ]
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain numbers and texts, seconds and bytes."""
    best = plan.best
    return {
        "run": asdict(plan.run),
        "cluster": asdict(plan.cluster),
        "best": {"strategy": best.way.strategy, "tile": list(best.way.tile), "patch_model": options(plan)},
        "enough_gpus": plan.enough,
        "self_attention": {
            "tile": list(plan.text.way.tile),
            "heads_over": plan.text.way.heads_over,
            "call": _calls(plan.text.forward, plan.text.backward),
        },
        "strategies": [_row_json(row) for row in plan.rows],
        "not legal": dict(plan.left_out),
    }


def _row_json(row: StrategyPlan) -> dict[str, Any]:
    return {
        "strategy": row.way.strategy,
        "tile": list(row.way.tile),
        "heads_over": row.way.heads_over,
        "seconds": row.seconds,
        "forward": row.forward,
        "backward": row.backward,
        "parts": {name: asdict(row.parts[name]) for name in PARTS},
        "memory": dict(row.memory),
        "memory_total": sum(row.memory.values()),
        "fits": row.fits,
        "longest_frames": row.longest,
        "cross_attention_call": _calls(row.cross.forward, row.cross.backward),
    }


def _calls(forward: CallCost, backward: CallCost | None) -> dict[str, dict[str, Any]]:
    both = {"forward": forward} | ({"backward": backward} if backward else {})
    return {name: {k: v for k, v in vars(cost).items() if k != "timeline"} for name, cost in both.items()}


def options(plan: Plan) -> dict[str, Any]:
    """The options of `patch_model` that run the best row, those that are not its defaults."""
    run, way = plan.run, plan.best.way
    chosen: dict[str, Any] = {"strategy": way.strategy}
    if run.gpus > 1 and run.self_attention != "ring":
        chosen["self_attention"] = run.self_attention
    if _takes_tile(way):
        chosen["tile"] = way.tile
    elif way.strategy not in ("mesh", "ulysses") and run.self_attention != "auto" and _takes_tile(plan.text.way):
        chosen["tile"] = plan.text.way.tile
    if not run.recompute:
        chosen["recompute_visual"] = False
    if not run.overlap:
        chosen["overlap"] = False
    if run.mlp_chunk_size is not None:
        chosen["mlp_chunk_size"] = run.mlp_chunk_size
    if run.vision_chunk_size != Workload.vision_chunk_size:
        chosen["vision_chunk_size"] = run.vision_chunk_size
    return chosen


def _takes_tile(way: ParallelSpec) -> bool:
    """Whether it does not run without being told its tile."""
    return way.strategy == "mesh" or (way.strategy == "ulysses" and way.tile != (1, 1))


def _heading(plan: Plan) -> str:
    run, cluster, model = plan.run, plan.cluster, plan.run.model
    peak = f" ({cluster.attention_forward / cluster.peak_flops:.0%} of peak)" if cluster.peak_flops else ""
    return "\n".join(
        [
            f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {run.trained_parameters / 1e9:.2f} B trained "
            f"({run.trained}); {run.frames} frames of {model.vision.keys} tokens, {run.text} text tokens"
            + (f", batch {run.batch}" if run.batch > 1 else ""),
            f"{run.gpus} GPUs of {cluster.name}: attention {cluster.attention_forward / 1e12:.4g} TFLOP/s forward{peak}"
            f", {cluster.gpus_per_node} to a node at {cluster.node_link / 1e9:.4g} GB/s, "
            f"{cluster.network_link / 1e9:.4g} GB/s between nodes",
            _assumed(plan),
        ]
    )


def _assumed(plan: Plan) -> str:
    run = plan.run
    told = [f"activations of {run.element} bytes, parameters of {run.parameter}, shared out by FSDP2"]
    if run.training:
        told[0] += f", gradients of {run.parameter}, optimizer {run.optimizer} bytes each"
        told.append("K and V of frames " + ("computed again in backward" if run.recompute else "kept"))
        told.append(("with" if run.checkpointing else "no") + " gradient checkpointing")
    if run.mlp_chunk_size is not None:
        told.append(f"MLPs of {run.mlp_chunk_size} tokens at once")
    own = "local" if run.self_attention == "local" else str(plan.text.way)
    return "; ".join([*told, f"self-attention {own}"])


def _times(plan: Plan) -> list[list[str]]:
    rows = [["strategy", "step", "forward", "backward", *PARTS]]
    for row in plan.rows:
        parts = [_seconds(row.parts[name].seconds) for name in PARTS]
        rows.append([str(row.way), _seconds(row.seconds), _seconds(row.forward), _seconds(row.backward), *parts])
    return rows


def _transfers(plan: Plan) -> list[list[str]]:
    names = ["cross exposed", "hidden", "self exposed", "hidden", "cross GB in node", "network", "network of all parts"]
    rows = [["strategy", *names]]
    for row in plan.rows:
        cross, own = row.parts["cross-attention"], row.parts["self-attention"]
        rows.append(
            [
                str(row.way),
                *(_seconds(value) for value in (cross.exposed, cross.hidden, own.exposed, own.hidden)),
                _giga(cross.node_bytes),
                _giga(cross.network_bytes),
                _giga(sum(part.network_bytes for part in row.parts.values())),
            ]
        )
    return rows


def _memory(plan: Plan) -> list[list[str]]:
    rows = [["strategy", "total", *KINDS, "fits", "longest video"]]
    for row in plan.rows:
        kinds = [_giga(row.memory[kind]) for kind in KINDS]
        fits = "yes" if row.fits else "no"
        rows.append([str(row.way), _giga(sum(row.memory.values())), *kinds, fits, f"{row.longest} frames"])
    return rows


def _verdict(plan: Plan) -> list[str]:
    best = plan.best
    lines = [f"{name}: left out, {why}" for name, why in plan.left_out.items()]
    if best.fits:
        given = ", ".join(f"{name}={value!r}" for name, value in options(plan).items())
        lines.append(f"Best: {best.way}, {_seconds(best.seconds)} s a step: patch_model(model, {given})")
        if plan.enough and plan.enough < plan.run.gpus:
            lines.append(f"{plan.enough} GPUs are enough to hold it, by LV-XAttn.")
    else:
        longest = max(row.longest for row in plan.rows)
        need = f"at most {longest} frames do" if longest else "nor does a single frame"
        more = f"{plan.enough} GPUs hold it" if plan.enough else "no number of GPUs holds it"
        lines.append(f"Nothing fits with {plan.run.frames} frames; {need}; {more}.")
    if _takes_tile(best.way) and _takes_tile(plan.text.way) and plan.run.self_attention != "auto":
        lines.append(f"patch_model takes one tile; planned are {best.way} for frames and {plan.text.way} for text.")
    if plan.run.frames > plan.run.text:
        lines.append(
            f"{plan.run.frames} frames have as many placeholders in the text, which {plan.run.text} tokens have no "
            "place for: plan with more."
        )
    return lines


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        return "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])

    return ["  " + line(row) for row in rows]


def _seconds(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _giga(value: float) -> str:
    value /= 1e9
    return "0" if value == 0 else f"{value:.2g}" if value < 1 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
