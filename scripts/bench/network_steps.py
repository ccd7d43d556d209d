"""Whole training steps of one model, in every mode, over links of a given speed.

The models and settings have the proportions of the paper's tables 3 and 4 (arXiv 2502.02406), which report the largest
ratio of whole steps, 5.58, for mPLUG-Owl3-1B with 4,096 text tokens and 2,048 frames on 16 A100. The paper's tables of
Llama 3-V are not in `paper/`; Llama's cases have the proportions of the mPLUG-Owl3-7B row with the same lengths.

A step is forward, backward, the average of the gradients over the ranks, and AdamW. Its learning rate is 0, so that
every step of every mode must give the same loss and the same gradient norm. Each mode has its own model with the same
weights, patched once, so the time of a step does not include what a patched model measures and plans in its first pass.

The link's speed follows from the time of a block, as for single calls. The part of the step that is not cross-attention
follows from the paper's table: where the model's own part is shorter, the step first sleeps for the rest of it, instead
of running the vision tower.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from harness import rounds, slowest_rank
from models import scaled
from network_calls import (
    BACKWARD,
    CLOSE,
    BlockTime,
    CallBenchmark,
    Mode,
    Setting,
    Speed,
    cluster,
    mode_columns,
    modes,
    scaled_row,
    setting_columns,
    without_transfers,
)
from paper_tables import PaperRow, paper_row
from torch import Tensor

from mllm_seqpar import FrameShard, patch_model
from mllm_seqpar.comm import Communicator
from mllm_seqpar.patching.patch import patch_of
from mllm_seqpar.planner import AttentionCall, Cluster, ParallelSpec, VisualProjection
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.projections import FunctionProjection
from namespaces import Network


def scaled_step(
    name: str,
    row: PaperRow,
    family: str,
    scale: int,
    *,
    ranks: int,
    rows: int,
    layers: int = 1,
    block_s: float | None = None,
) -> Setting:
    """Return the setting of a step with the proportions of a row of the paper, all widths divided by `scale`.

    Every second layer of the model, `layers` in all, has cross-attention. Llama is not the paper's model of its row.
    """
    llama = family == "mllama"
    model = scaled(family, scale, "llama-3.2-11b-vision" if llama else row.model.name, 2 * layers, every=2)
    cross = model.sizes.cross
    heads = {"heads": cross.heads, "kv_heads": cross.kv_heads, "dim": cross.head_dim}
    setting = replace(scaled_row(name, row, ranks, rows, block_s), **heads, dtype="bfloat16" if block_s else "float32")
    return replace(
        setting,
        paper=None if llama else row,
        model=model,
        layers=layers,
        rest=row.step_seconds["lv-xattn"] / row.seconds["lv-xattn"] - 1,
    )


def short_video(setting: Setting) -> Setting:
    """Return the setting with so few keys that K and V are smaller than Q and O, and LV-XAttn is not the fastest."""
    keys = 2 * setting.rows
    return replace(setting, keys=keys, mbit=25, transfer_in_blocks=None, paper=None, rest=None)


OWL3, OWL3_7B = paper_row("table3", "mPLUG-Owl3-1b", 2), paper_row("table3", "mPLUG-Owl3-7b", 2)
OWL3_A30, FLAMINGO = paper_row("table4", "mPLUG-Owl3-1b", 0), paper_row("table4", "OpenFlamingo-3b", 2)
STEP_SUITES: dict[str, Callable[[], list[Setting]]] = {
    "steps": lambda: [
        scaled_step("a100-owl3", OWL3, "mplug_owl3", 16, ranks=8, rows=16, block_s=0.016),
        scaled_step("a30-owl3", OWL3_A30, "mplug_owl3", 16, ranks=8, rows=16, block_s=0.008),
        scaled_step("a30-flamingo", FLAMINGO, "open_flamingo", 16, ranks=8, rows=64, block_s=0.012),
        scaled_step("llama", OWL3_7B, "mllama", 32, ranks=8, rows=16, block_s=0.016),
        short_video(scaled_step("short-video", OWL3, "mplug_owl3", 16, ranks=8, rows=256, block_s=0.01)),
    ],
    "real-steps": lambda: [
        scaled_step("a100-owl3", OWL3, "mplug_owl3", 4, ranks=2, layers=2, rows=32),
        scaled_step("a30-flamingo", FLAMINGO, "open_flamingo", 16, ranks=2, layers=2, rows=128),
        scaled_step("llama", OWL3_7B, "mllama", 16, ranks=2, layers=2, rows=32),
    ],
}


def step_modes(setting: Setting) -> list[Mode]:
    """Return `none`, the strategies that the paper compares, and "auto", whose spec the planner selects."""
    names = ("none", "lv-xattn", "ring", "ring, expanded")
    chosen = [mode for mode in modes(setting) if mode.name in names or mode.name.startswith("ulysses")]
    return [*chosen, Mode(name="auto", spec=None)]


class Step:
    def __init__(self, setting: Setting, mode: Mode, comm: Communicator, kernel: str, features: Tensor) -> None:
        assert setting.model is not None
        self.mode, self.comm, self.features = mode, comm, features
        self.model = setting.model.build().to(features.dtype).train().requires_grad_(True)
        shard = FrameShard(comm.rank, comm.rank + 1, comm.size)
        self.arguments = setting.model.arguments(setting.rows * comm.size, features, shard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        options: dict[str, Any] = {"kernel": kernel}
        strategy = mode.spec.strategy if mode.spec else "auto"
        if mode.spec and mode.spec.strategy == "ulysses" and mode.spec.mesh_shape != (1, 1):
            options["tile"] = mode.spec.mesh_shape
        if mode.expanded:
            options["accumulate_dtype"] = mode.accumulate_dtype
            comm = copy.copy(comm)
            comm.expanded_heads = setting.heads  # type: ignore[attr-defined]
            _expand_keys()
        if not mode.transfers:
            comm = without_transfers(comm)
        patch_model(self.model, strategy, group=comm, **options)

    def once(self, rest_s: float) -> tuple[float, float, float, int]:
        """Return the slowest rank's seconds of a step, the loss, the gradient norm, and the bytes this rank sends."""
        with slowest_rank(self.comm, "cpu") as timer:
            self.comm.bytes.reset()
            time.sleep(rest_s)
            self.features.grad = None
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.model(**self.arguments).loss
            loss.backward()
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            mean = self.comm.all_reduce(torch.cat([grad.flatten() for grad in grads]), "gradients").div_(self.comm.size)
            for grad, part in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
            self.optimizer.step()
            sent = self.comm.bytes.total
        return timer.seconds, float(loss.detach()), float(mean.float().norm()), sent

    @property
    def spec(self) -> ParallelSpec | None:
        """The spec of the mode's cross-attention, after a step; None without transfers."""
        if self.mode.name != "auto":
            return self.mode.spec
        selector = patch_of(self.model).context.selector  # type: ignore[union-attr]
        return next(iter(selector._selections.values())).spec  # type: ignore[union-attr]

    @property
    def matmul(self) -> float:
        """The rate of matrix products that "auto" has measured, in FLOP/s."""
        selector = patch_of(self.model).context.selector  # type: ignore[union-attr]
        *_, cluster = next(iter(selector._selections))  # type: ignore[union-attr]
        return cluster.matmul


class StepBenchmark:
    """All modes of a setting's training step, as one of its ranks."""

    def __init__(self, setting: Setting, comm: Communicator) -> None:
        assert setting.model is not None
        self.setting, self.model, self.comm = setting, setting.model, comm
        self.calls = CallBenchmark(setting, comm)
        generator = torch.Generator().manual_seed(comm.rank)
        frame = torch.randn(1, setting.keys, self.model.sizes.cross.visual_dim, generator=generator)
        self.features = frame.to(getattr(torch, setting.dtype)).requires_grad_()

    def run(self, repeats: int, links: Network | None) -> list[dict[str, Any]]:
        setting, kernel, load = self.setting, self.calls.kernel, os.getloadavg()[0]
        with self.calls.emulated():
            block = self._block()
            mbit, speed = self.calls.shape_link(links, sum(block) / (1 + BACKWARD))
            options = self.comm, kernel.name if kernel else "auto", self.features
            steps = {mode.name: Step(setting, mode, *options) for mode in step_modes(setting)}
            steps["none"].once(0.0)
            own_s = median(steps["none"].once(0.0)[0] for _ in range(3))  # without sleeping
            cross_s = setting.layers * setting.ranks * sum(block)
            rest_s = 0.0 if setting.rest is None else max(0.0, (1 + setting.rest) * cross_s - own_s)
            times, sent = self._timed(steps, repeats, rest_s)
        common = {"benchmark": "end_to_end"} | setting_columns(setting, block[0], mbit, speed)
        common |= {"layers": setting.layers, "rest_s": rest_s, "cross_share": cross_s / (own_s + rest_s)}
        if (paper := setting.paper) is not None:  # times of whole steps
            common |= {"paper_ring_s": paper.step_seconds["ring"], "paper_lv_xattn_s": paper.step_seconds["lv-xattn"]}
            common |= {"paper_cross_share": paper.seconds["lv-xattn"] / paper.step_seconds["lv-xattn"]}
        common |= {"selected": str(steps["auto"].spec), "load": load}
        best = min((name for name in times if name not in ("none", "auto")), key=lambda name: median(times[name]))
        spread = max((max(times[mode]) - min(times[mode])) / median(times[mode]) for mode in (best, "auto"))
        common |= {"best": best, "auto_over_best": _ratio(times["auto"], times[best]), "spread": spread}
        predicted = self._predicted(steps, median(times["none"]), block, speed)
        rows = []
        for mode, seconds in times.items():
            ratios = {"over_none": times["none"], "over_lv_xattn": times["lv-xattn"]}
            row = common | mode_columns(mode, seconds, sent[mode], predicted[mode])
            rows.append(row | {name: _ratio(seconds, others) for name, others in ratios.items()})
        return rows

    def _block(self) -> BlockTime:
        none, n = modes(self.setting)[0], self.setting.ranks
        self.calls.once(none)
        runs = [self.calls.once(none) for _ in range(5)]
        forward = median(run[0] for run in runs)
        return forward / n, (median(run[1] for run in runs) - forward) / n

    def _timed(
        self, steps: dict[str, Step], repeats: int, rest_s: float
    ) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Return the seconds of each mode's steps in the order of repetitions, and the bytes that a step sends."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        sent: dict[str, int] = {}
        expected: Sequence[float] | None = None
        for name, timed in rounds(steps, repeats):
            seconds, *result, sent[name] = steps[name].once(rest_s if timed else 0.0)
            if name != "none" or self.calls.kernel:  # real blocks of `none` attend to keys of this rank only
                expected = self._same(name, result, expected or result)
            if timed:
                times[name].append(seconds)
        return times, sent

    def _same(self, name: str, result: Sequence[float], expected: Sequence[float]) -> Sequence[float]:
        """Raise SystemExit, on all ranks, if loss or gradient norm differ from those of the other modes."""
        limit = CLOSE[self.features.dtype]
        for what, value, other in zip(("loss", "gradient norm"), result, expected, strict=True):
            if not abs(value - other) <= limit * abs(other):
                raise SystemExit(f"{self.setting.name}, {name}: {what} {value}; other modes have {other}")
        return expected

    def _predicted(
        self, steps: dict[str, Step], none_s: float, block: BlockTime, speed: Speed | None
    ) -> dict[str, float]:
        """Predict a step as a measured one without transfers, and what they add to the planner's cross-attention."""
        if speed is None:
            return dict.fromkeys(steps, none_s)
        rates = replace(cluster(self.setting, block, speed), matmul=steps["auto"].matmul)
        ideal = replace(rates, network_link=1e18, node_link=1e18, network_latency_s=0.0, node_latency_s=0.0)
        visual = VisualProjection(dim=self.model.sizes.cross.visual_dim, layers=self.setting.layers)

        def call_s(mode: Mode, spec: ParallelSpec | None, network: Cluster) -> float:
            assert spec is not None
            problem = mode.problem(self.setting)
            calls = (AttentionCall(problem, spec, network, backward=b, visual=visual) for b in (False, True))
            return sum(call.cost.seconds for call in calls)

        lv = steps["lv-xattn"].mode
        without = call_s(lv, lv.spec, ideal)
        added = {name: call_s(step.mode, step.spec, rates) - without for name, step in steps.items() if name != "none"}
        return {name: none_s + self.setting.layers * added.get(name, 0.0) for name in steps}


def _ratio(seconds: list[float], others: list[float]) -> float:
    return median(x / y for x, y in zip(seconds, others, strict=True))


@functools.cache
def _expand_keys() -> None:
    """Repeat visual K and V for all query heads in models whose communicator has the attribute `expanded_heads`."""
    original = ForwardState.frame_keys

    def frame_keys(self: ForwardState, q: Tensor, layer: Any, project: Any) -> Any:
        heads = getattr(self.context.comm, "expanded_heads", None)

        def repeated(features: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.repeat_interleave(heads // x.shape[1], dim=1) for x in project(features, index))

        return original(self, q, layer, FunctionProjection(repeated, project.modules) if heads else project)

    ForwardState.frame_keys = frame_keys  # type: ignore[method-assign]
