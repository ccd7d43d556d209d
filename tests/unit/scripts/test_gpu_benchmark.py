"""Layer: one process. The benchmark of one GPU, rehearsed on the CPU with tiny sizes."""

import json
from pathlib import Path

import pytest
import torch

from mllm_seqpar.planner.model_sizes import read_model


def measured(script, path: Path, *parts: str) -> list[dict]:
    script("gpu").main(["--device", "cpu", "--tiny", "--repeats", "1", "--out", str(path), "--parts", *parts])
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_kernels_are_found_by_name_and_compared(script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(script, tmp_path / "rows.jsonl", "ceilings", "attention", "masks", "ranks")
    assert not [row for row in rows if "problem" in row]
    kernels = {
        measure: {row["kernel"] for row in rows if row["measure"] == measure} for measure in ("attention", "masks")
    }
    assert {"sdpa math", "torch_cpu", "blocked_matmul", "auto"} <= kernels["attention"]
    assert {"torch_cpu", "auto"} <= kernels["masks"]
    assert all(row["forward_tflops"] > 0 and row["backward_tflops"] > 0 for row in rows if "kernel" in row)
    assert [row["ranks"] for row in rows if row["measure"] == "ranks in one process"] == [2, 2]
    assert {"commit", "torch", "hardware"} <= rows[0].keys()
    printed = capsys.readouterr().out
    assert "| B,H,G,S,T,D | sdpa math |" in printed and "All ranks of a call in one process" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("model", "modes"), [("mplug-owl3-7b", 3), ("qwen2_5_vl_7b", 2)])
def test_models_are_measured_in_every_mode(script, tmp_path: Path, model: str, modes: int) -> None:
    rows = measured(script, tmp_path / "rows.jsonl", model)
    assert not [row for row in rows if "problem" in row]
    assert all(row["model"] == model for row in rows)
    found = [(row["measure"], row.get("run"), row.get("mode")) for row in rows]
    stored = ["stored"] if modes == 3 else []
    passes = [("pass", "forward", mode) for mode in ("patched", "unpatched")]
    passes += [("pass", "step", mode) for mode in ("patched", *stored, "unpatched")]
    memory = [("memory", None, mode) for mode in ("patched", *stored, "unpatched")]
    assert found == [
        ("tower", None, None),
        *passes[:2],
        ("decoding", None, None),
        ("launches", None, None),
        *passes[2:],
        *memory,
    ]
    (decoding,) = (row for row in rows if row["measure"] == "decoding")
    assert decoding["same_tokens"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mplug-owl3-7b", "qwen2_5_vl_7b"])
def test_models_have_their_published_sizes(script, name: str) -> None:
    made = script("gpu_models").MODELS[name]("meta", torch.bfloat16, False)
    planned = read_model(name).parameters
    assert sum(x.numel() for x in made.model.parameters()) == pytest.approx(planned, rel=5e-3)
    assert {x.dtype for x in made.model.parameters()} == {torch.bfloat16} and torch.get_default_dtype() == torch.float32


def test_wrong_results_and_failed_parts_are_rows(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "CLOSE", 0.0)

    def broken(args):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setitem(gpu.PARTS, "ranks", broken)
    rows = measured(script, tmp_path / "rows.jsonl", "masks", "ranks")
    assert all("wrong: row" in row["problem"] for row in rows[:-1]) and len(rows) > 1
    assert rows[-1]["problem"] == "OutOfMemoryError: no memory left"
    report = script("report").gpu_tables(rows)
    assert "- ranks: OutOfMemoryError: no memory left" in report and "masks, auto" in report


def test_benchmark_stops_when_its_time_is_over(script, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(script("gpu"), "BUDGET_S", 0.0)
    rows = measured(script, tmp_path / "rows.jsonl", "ceilings", "masks")
    assert [row.get("problem") for row in rows] == [None, "stopped here: out of time"]


def test_benchmark_needs_a_gpu_or_a_rehearsal(script, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="no CUDA GPU here; --tiny rehearses"):
        script("gpu").main(["--device", "cpu"])
    assert "gpu" not in script("run_all").DEFAULT and "memory" in script("run_all").DEFAULT
