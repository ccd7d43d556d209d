"""Layer: one process. The benchmark of training steps, small: its clock against known times, its parts and checks."""

import importlib
import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
MODULES = ("decode_models", "measure", "model_step", "rows", "step_clock", "step_parts", "step_runs")
FAMILIES = ("idefics", "open_flamingo", "mllama", "mplug_owl3")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(importlib.import_module("decode_models"), "WIDTH", 64)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


class Sleeper(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        time.sleep(forward)
        ctx.backward_s = backward
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Model:
    """tower -> outer(inner), each with a time of its own in both directions."""

    def tower(self, pixels: torch.Tensor) -> torch.Tensor:
        return Sleeper.apply(pixels * self.weight, 0.02, 0.05)

    def outer(self, *, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        x = Sleeper.apply(x, 0.03, 0.0)
        return Sleeper.apply(self.inner(x), 0.0, 0.04), "and more"

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeper.apply(x, 0.06, 0.07)

    def __init__(self) -> None:
        self.weight = torch.ones(3, requires_grad=True)


def test_the_clock_tells_parts_apart_in_both_directions(bench) -> None:
    step_clock = bench("step_clock")
    clock, model = step_clock.Clock(torch.device("cpu")), Model()
    calls = [(model, name, name) for name in ("tower", "outer", "inner")]
    with step_clock.timed_calls(clock, calls), clock.running():
        features = model.tower(torch.ones(3))
        out, _ = model.outer(x=Sleeper.apply(features, 0.0, 0.08))
        out.sum().backward()
        clock.backward_done()
        time.sleep(0.01)
    assert model.weight.grad.tolist() == [1.0] * 3
    # At least: a busy machine makes any sleep longer. Time of one part that went to another would be missing there.
    expected = {"tower": 0.07, "outer": 0.07, "inner": 0.13, "rest": 0.09}
    for part, seconds in expected.items():
        assert seconds <= clock.seconds[part], (part, clock.seconds)
    assert "forward" not in vars(model) and "tower" not in vars(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(bench, family: str) -> None:
    if family == "open_flamingo" and importlib.util.find_spec("open_flamingo") is None:
        pytest.skip("open_flamingo is installed with --no-deps by scripts/test.sh")
    bench_ = bench("step_runs").StepBench(family, 2, 6, "lv-xattn", torch.device("cpu"))
    unpatched, patched = bench_.rows(1)
    model_step = bench("model_step")
    for row in (unpatched, patched):
        assert all(row[f"{part}_share"] > 0 for part in ("cross", "self", "vision", "rest"))
        assert sum(row[f"{part}_share"] for part in bench("step_parts").PARTS) == pytest.approx(1)
        assert len(model_step.text(row)) == len(model_step.HEAD)
    assert patched["ratio"] == pytest.approx(patched["step_s"] / unpatched["step_s"])
    assert not any("forward" in vars(module) for module in bench_.subject.model.modules())


def test_another_loss_is_no_result(bench) -> None:
    runs = bench("step_runs")
    bench_ = runs.StepBench("idefics", 1, 4, "lv-xattn", torch.device("cpu"))
    step = bench_.unpatched(False)
    bench_.check(step, step)
    for other in (runs.Step(step.loss * 1.001, step.gradient, 1.0, {}), runs.Step(step.loss, 0.0, 1.0, {})):
        with pytest.raises(SystemExit, match="idefics, 1 ranks: (loss|gradient norm)"):
            bench_.check(other, step)
