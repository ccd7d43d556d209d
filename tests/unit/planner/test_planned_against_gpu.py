"""Layer: pure Python. What the planner says of one H200 against the rows that were measured there."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from launch import ROOT
from mllm_seqpar.planner import ParallelSpec, read_cluster
from mllm_seqpar.planner.call_cost import AttentionCall
from mllm_seqpar.planner.cluster import Passes
from mllm_seqpar.planner.memory import peak_memory
from mllm_seqpar.planner.model_sizes import ModelSizes, read_model
from mllm_seqpar.planner.plan import attention_selection
from mllm_seqpar.planner.step import step_parts
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.schedules.bytes_sent import Problem

ALLOWED = 0.15
FEW_ROWS = 1024
"""With fewer rows of a head, kernels do not fill the GPU, which a rate does not capture."""

H200 = read_cluster("h200-141g-8xN")
ROWS = [json.loads(line) for line in (ROOT / "docs" / "benchmarks" / "gpu.jsonl").read_text().splitlines()]
OWL = read_model("mplug-owl3-7b")


def rows(measure: str, chosen: Callable[[dict[str, Any]], bool] = lambda row: True) -> list[Any]:
    found = [row for row in ROWS if row["measure"] == measure and "problem" not in row and chosen(row)]
    found = [row for row in found if row.get("model", OWL.name) == OWL.name]
    assert found
    return [pytest.param(row, id=" ".join(str(x) for x in row.values() if isinstance(x, str | int))) for row in found]


def planned(row: dict[str, Any], model: ModelSizes = OWL, **options: Any) -> dict[str, Passes]:
    workload = Workload(model=model, frames=row["frames"], text=row.get("text", row["frames"]), gpus=1, **options)
    calls = {part: attention_selection(workload, H200, part) for part in ("self-attention", "cross-attention")}
    return dict(step_parts(workload, H200, calls))


@pytest.mark.parametrize("row", rows("pass", lambda row: row["mode"] != "unpatched"))
def test_passes_are_planned_as_measured(row: dict[str, Any]) -> None:
    """The features were given, and the forward pass computed the logits of one token."""
    if row["run"] == "forward":
        parts = planned(row, trained="none")
        del parts["vocabulary"]
    else:
        parts = planned(row, trained="language", checkpointing=True, recompute=row["mode"] == "patched")
    del parts["vision tower"]
    assert sum(x.seconds for x in parts.values()) * 1e3 == pytest.approx(row["ms"], rel=ALLOWED)


def has_a_peak(row: dict[str, Any]) -> bool:
    return row["mode"] != "unpatched" and "peak_gib" in row


@pytest.mark.parametrize("row", rows("pass", has_a_peak))
def test_peaks_are_planned_as_measured(row: dict[str, Any]) -> None:
    """The measured peaks are those above the weights, the gradients and the features."""
    options: dict[str, Any] = {"trained": "none"}
    if row["run"] == "step":
        options = {"trained": "language", "checkpointing": True, "recompute": row["mode"] == "patched"}
    workload = Workload(
        model=OWL,
        frames=row["frames"],
        text=row["text"],
        gpus=1,
        parameter=2,
        optimizer=0,
        vision_chunk_size=1,
        **options,
    )
    kinds = peak_memory(workload, ParallelSpec("lv-xattn", (1, 1)))
    given = kinds["parameters"] + kinds["gradients"] + workload.features_bytes
    assert sum(kinds.values()) == pytest.approx(given + row["peak_gib"] * 2**30, rel=ALLOWED)


@pytest.mark.parametrize("row", rows("tower"))
def test_tower_is_planned_as_measured(row: dict[str, Any]) -> None:
    seconds = planned(row, replace(OWL, projector=None), trained="none")["vision tower"].seconds
    assert row["frames"] / seconds == pytest.approx(row["frames_per_s"], rel=ALLOWED)


def has_many_rows_and_the_kernel_of_auto(row: dict[str, Any]) -> bool:
    return row["kernel"].startswith("auto") and int(row["shape"].split(",")[3]) >= FEW_ROWS


@pytest.mark.parametrize("row", rows("attention", has_many_rows_and_the_kernel_of_auto))
def test_attention_is_planned_as_measured(row: dict[str, Any]) -> None:
    batch, heads, kv_heads, length, keys, dim = map(int, row["shape"].split(","))
    problem = Problem(rows=length, keys=(keys,), heads=heads, kv_heads=kv_heads, dim=dim, batch=batch, key_batch=batch)
    for name, backward, flops in (("forward", False, 4), ("backward", True, 10)):
        cost = AttentionCall(problem, ParallelSpec("lv-xattn", (1, 1)), H200, backward=backward).cost
        rate = flops * batch * heads * length * keys * dim / cost.seconds / 1e12
        assert rate == pytest.approx(row[f"{name}_tflops"], rel=ALLOWED), name
