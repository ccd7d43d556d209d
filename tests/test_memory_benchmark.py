"""Layer: one process. The memory benchmark, small: its counts against tensors of known size, and its rows."""

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_seqpar.planner.candidates import ParallelSpec
from mllm_seqpar.planner.memory import saved_for_backward as kept_by_formula
from mllm_seqpar.planner.workload import Workload

LV = ParallelSpec("lv-xattn", (1, 1))
BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
MODULES = (
    "decode_models",
    "measure",
    "memory",
    "memory_cost",
    "memory_measure",
    "memory_models",
    "memory_steps",
    "rows",
)
MIB = 2**20


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def test_counts_what_is_known(bench) -> None:
    weight = torch.ones(512, 512, requires_grad=True)
    weight.grad = torch.zeros_like(weight)

    def loss(x: torch.Tensor) -> torch.Tensor:
        squares = (x @ weight).square()  # keeps x, which is given, and the product, 1 MiB
        torch.empty(4 * MIB, dtype=torch.uint8)  # here and gone
        return squares.exp().sum()  # keeps its own result, 1 MiB

    def features() -> torch.Tensor:
        return torch.ones(512, 512, requires_grad=True)  # 1 MiB

    held = bench("memory_measure").held_by(features, loss, [weight])
    assert held.kept == 2 * MIB
    # features, product, squares (which exp still reads), and what was here and gone
    assert 7 * MIB <= held.peak < 7 * MIB + 4096


def measured(bench, family: str, scale: int, text: int) -> Any:
    """The benchmark of one family, on this process."""
    if family == "open_flamingo" and importlib.util.find_spec("open_flamingo") is None:
        pytest.skip("open_flamingo is installed with --no-deps by scripts/test.sh")
    return bench("memory_steps").Bench(family, scale, text, torch.device("cpu"), largest=2)


def kept_by_autograd(bench, it: Any, recompute: bool, frames: int) -> int:
    """Bytes kept for the backward pass, beside parameters and features."""
    features = it.features(frames)
    counter = bench("memory_measure").Kept([*it.subject.model.parameters(), features])
    with it.patched(bench("memory_steps").Mode("lv-xattn", recompute)), counter.counting():
        it.loss(frames, features)
    return counter.bytes


@pytest.mark.parametrize("family", ["mplug_owl3", "open_flamingo", "idefics"])
def test_kept_is_what_the_layers_keep(bench, family: str) -> None:
    """Per frame: nothing with recomputation; without, what the planner says: K, V, and what norms before them keep."""
    it = measured(bench, family, 32, 16)
    kept = partial(kept_by_autograd, bench, it)

    def planned(frames: int) -> int:
        run = Workload(model=it.subject.sizes, frames=frames, text=16, gpus=1, recompute=False)
        return kept_by_formula(run, LV)

    assert kept(True, 1) == kept(True, 2)
    assert kept(False, 2) - kept(False, 1) == pytest.approx(planned(2) - planned(1), rel=0.01)


@pytest.mark.parametrize("family", ["mplug_owl3", "open_flamingo", "idefics"])
def test_a_token_of_text_costs_what_the_planner_says(bench, family: str) -> None:
    """At most 2% more, and 9% less where norms are layer norms, as in OpenFlamingo's blocks."""
    it = measured(bench, family, 16, 128)
    it.subject.model.requires_grad_(True)  # IDEFICS is made with a frozen language model

    def kept(text: int) -> int:
        it.text = text
        return kept_by_autograd(bench, it, True, 1) - text * 1024 * 4  # the logits, in float32

    def planned(text: int) -> int:
        run = Workload(model=it.subject.sizes, frames=1, text=text, gpus=1)
        return kept_by_formula(run, LV)

    assert 0.98 < (planned(256) - planned(128)) / (kept(256) - kept(128)) < 1.09


def test_the_largest_video_is_the_last_that_fits(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the peak's shape: flat first, then two slopes."""
    steps = bench("memory_steps")
    it = steps.Bench("mplug_owl3", 32, 128, torch.device("cpu"), largest=8)

    def held(mode: object, frames: int) -> dict[str, int]:
        return {"frames": frames, "peak_bytes": max(500, 100 + 7 * frames, 13 * frames - 200)}

    monkeypatch.setattr(it, "held", held)
    row = partial(held, None)
    for budget in (510, 600, 999):
        found = it.largest_in(steps.Mode("ring", True), budget, row(4), row(8))
        assert found["peak_bytes"] <= budget < found["next_peak_bytes"]
        assert found["next_peak_bytes"] == row(found["frames"] + 1)["peak_bytes"]
    capped = it.largest_in(steps.Mode("ring", True), 9999, row(4), row(8))
    assert capped["capped"]
    told = {"measure": "largest", "strategy": "ring", "recompute": True, "budget_bytes": 9999}
    line = bench("memory").line(told | capped | {"longer": 2.0, "planned_longer": 2.5})
    assert f">= {capped['frames']} frames fit" in line and ": >= 2.00 times, planner 2.50" in line


def test_rows(bench, capsys: pytest.CaptureFixture) -> None:
    memory = bench("memory")
    numbers = {"scale": 32, "frames": 1, "text": 14, "repeats": 1, "cost_text": 12, "threads": 1}
    rows = memory.rows_of(memory.Settings(("mplug_owl3",), (1,), **numbers, device="cpu", quick=True))
    assert [row["measure"] for row in rows] == ["bytes"] * 4 + ["largest"] * 2 + ["cost"]
    kept, again, cost = rows[4:]
    assert kept["frames"] == 2 and kept["peak_bytes"] == rows[1]["peak_bytes"] == pytest.approx(
        kept["budget_bytes"], rel=0.02
    )
    assert again["longer"] == again["frames"] / 2 >= 1.6
    assert all(row["peak_bytes"] > row["kept_bytes"] for row in rows[:4])
    assert cost["share"] == pytest.approx(1 - 1 / cost["ratio"])
    assert capsys.readouterr().out.count("\n") == 1 + 1 + 1 + len(rows)
