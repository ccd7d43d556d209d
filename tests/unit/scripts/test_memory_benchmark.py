"""Layer: one process. The memory benchmark, small: its counts, the planner's estimates for whole models, its rows."""

import importlib.util
from functools import partial

import pytest
import torch

from launch import ROOT
from memory_meters import SavedBytes, peak_memory
from mllm_seqpar.planner.call_cost import ParallelSpec
from mllm_seqpar.planner.memory import saved_for_backward as saved_by_formula
from mllm_seqpar.planner.workload import Workload

MIB = 2**20
ROWS = ROOT / "docs" / "benchmarks"


def test_saved_and_peak_bytes_of_known_tensors() -> None:
    weight = torch.ones(512, 512, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    with peak_memory(torch.device("cpu")) as peak:
        x = torch.ones(512, 512, requires_grad=True)  # 1 MiB
        saved = SavedBytes([weight, x])
        with saved.counting():
            squares = (x @ weight).square()  # saves x, which is excluded, and the product, 1 MiB
            torch.empty(4 * MIB, dtype=torch.uint8)  # allocated and freed
            loss = squares.exp().sum()  # saves the result of exp, 1 MiB
            del squares
        loss.backward()
    assert saved.bytes == 2 * MIB
    assert 7 * MIB <= peak.bytes < 7 * MIB + 4096  # x, the product, the squares, and the 4 MiB


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mplug_owl3", "open_flamingo", "idefics"])
def test_saved_bytes_grow_as_the_planner_estimates(script, family: str) -> None:
    """With one more frame (nothing with recomputation) and with more text tokens (layer norms, and torch's own
    attention on one process, save up to 13% less)."""
    if family == "open_flamingo" and importlib.util.find_spec("open_flamingo") is None:
        pytest.skip("open_flamingo is installed with --no-deps by scripts/test.sh")
    memory = script("memory")
    bench = memory.MemoryBenchmark(family, 16, 128, torch.device("cpu"), largest=3)
    bench.model.requires_grad_(True)  # IDEFICS has a frozen language model as constructed

    def saved(recompute: bool, frames: int, text: int) -> int:
        bench.text = text
        features = bench.features(frames)
        counter = SavedBytes([*bench.model.parameters(), features])
        with bench.patched(memory.Mode("lv-xattn", recompute)), counter.counting():
            bench.loss(frames, features)
        return counter.bytes - text * 1024 * 4  # without the logits, in float32

    def planned(recompute: bool, frames: int, text: int) -> int:
        step = Workload(model=bench.scaled.sizes, frames=frames, text=text, gpus=1, recompute=recompute)
        return saved_by_formula(step, ParallelSpec("lv-xattn", (1, 1)))

    assert saved(True, 2, 128) == saved(True, 3, 128)
    # Not from 1 to 2: with one frame OpenFlamingo needs no mask, and one process then saves less of each row.
    of_frame = [count(False, 3, 128) - count(False, 2, 128) for count in (saved, planned)]
    assert of_frame[0] == pytest.approx(of_frame[1], rel=0.01)
    of_text = [count(True, 2, 256) - count(True, 2, 128) for count in (saved, planned)]
    assert 0.98 < of_text[1] / of_text[0] < 1.13


def test_longest_video_is_the_last_that_fits(script, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = script("memory")
    bench = memory.MemoryBenchmark("mplug_owl3", 32, 128, torch.device("cpu"), largest=8)

    def step_bytes(mode: object, frames: int) -> dict[str, int]:  # flat first, then two slopes
        return {"frames": frames, "peak_bytes": max(500, 100 + 7 * frames, 13 * frames - 200)}

    monkeypatch.setattr(bench, "step_bytes", step_bytes)
    row = partial(step_bytes, None)
    for budget in (510, 600, 999):
        found = bench.largest_in(memory.Mode("ring", True), budget, row(4), row(8))
        assert found["peak_bytes"] <= budget < found["next_peak_bytes"]
        assert found["next_peak_bytes"] == row(found["frames"] + 1)["peak_bytes"]
    capped = bench.largest_in(memory.Mode("ring", True), 9999, row(4), row(8))
    assert capped["capped"] and capped["frames"] == 120  # 128 tokens without 8 words


@pytest.mark.slow
def test_benchmark_gives_rows_of_all_kinds(script) -> None:
    memory = script("memory")
    sizes = "--scale 32 --frames 1 --text 14 --repeats 1 --cost-text 12 --device cpu --family mplug_owl3".split()
    rows = memory.rows_on_rank(memory.parse(sizes))
    assert [row["measure"] for row in rows] == ["bytes"] * 4 + ["largest"] * 2 + ["cost"]
    stored, recomputed, cost = rows[4:]
    assert stored["frames"] == 2 and stored["peak_bytes"] == rows[1]["peak_bytes"]
    assert stored["peak_bytes"] == pytest.approx(stored["budget_bytes"], rel=0.02)
    assert recomputed["longer"] == recomputed["frames"] / 2 >= 1.6
    assert all(row["peak_bytes"] > row["kept_bytes"] for row in rows[:4])
    assert cost["share"] == pytest.approx(1 - 1 / cost["ratio"])
    read = script("harness").read
    published = [row for name in ("memory", "memory-million") for row in read(ROWS / f"{name}.jsonl")]
    columns = {name for row in published for name in row}
    machine = {"torch", "commit", "hardware", "threads", "transformers"}
    assert {name for row in rows for name in row} - {"capped"} | machine == columns - {"capped"}
    assert "| 1 | lv-xattn | recomputed | 2 |" in script("report").memory_tables(rows)


def test_frames_of_moss_vl_differ_in_size(script) -> None:
    memory = script("memory")
    assert script("models").scaled("moss_vl", 64).frame_tokens(3) == [221 - 55, 221 + 55, 221 - 55]
    options = "--scale 64 --frames 2 --frame-tokens 9 --text 12 --device cpu --family moss_vl".split()
    (row,) = memory.rows_on_rank(memory.parse(options))
    assert row["strategy"] == "lv-xattn" and row["recompute"] and row["visual_tokens"] == 7 + 11
    assert row["peak_bytes"] > row["kept_bytes"] > 0
    assert "| 1 | lv-xattn | recomputed | 2 | 18 |" in script("report").memory_tables([row])
