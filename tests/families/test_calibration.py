"""Layer: one process, loopback ranks. What `strategy="auto"` measures, and when; the rates of all kernels."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from family_harness import inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.comm import LoopbackCommunicator, LoopbackWorld, Pending, Recv, Send, run_loopback
from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.kernels.blocked_matmul import BlockedMatmulKernel
from mllm_seqpar.kernels.fused import TorchCpuKernel
from mllm_seqpar.planner import Cluster, auto, calibrate, write_cluster
from mllm_seqpar.planner.auto import ClusterSelector
from tiny_models.mplug_owl3 import Case

AUTO = {"strategy": "auto", "self_attention": "auto"}
CASE = Case(frames=(3, 2), train=True)
RATES = dict.fromkeys(("attention_forward", "attention_backward", "matmul", "node_link", "network_link"), 1e9)
CLUSTER = Cluster(name="m", gpus_per_node=2, memory_bytes=1e9, node_latency_s=1e-5, network_latency_s=1e-5, **RATES)
SHAPE = calibrate.AttentionShape(heads=2, kv_heads=1, dim=16)
HEADS = {"heads": 4, "kv_heads": 2, "dim": 16}
"""Those of the tiny model, in self-attention and in hyper attention."""


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, calibrate.AttentionShape, bool]]:
    """Record what rank 0 measures: the device, the shape, and whether the links are measured too."""
    found = []

    def measure(comm: Any, *, device: torch.device, shape: Any, links_of: Cluster | None) -> Cluster:
        if comm.rank == 0:
            found.append((device.type, shape, links_of is None))
        return replace(CLUSTER, source=f"measured: {shape}")

    monkeypatch.setattr(calibrate, "calibrate", measure)
    return found


def test_model_patched_in_float32_calibrates_for_what_it_runs_in(
    calibrations: list[Any], caplog: pytest.LogCaptureFixture
) -> None:

    def run(comm: Any) -> list[int]:
        model = patch_model(model_of("mplug_owl3", CASE), group=comm, **AUTO)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs, counts = inputs_of("mplug_owl3", CASE, model), [len(calibrations)]
        for autocast in (True, True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(**inputs).loss
            comm.gather_ints([0])
            counts.append(len(calibrations))
            loss.backward()
            comm.gather_ints([0])
            counts.append(len(calibrations))
        return counts

    with caplog.at_level(logging.INFO, logger=auto.__name__):
        counts, _ = run_loopback(2, run)
    assert counts == [0, 1, 1, 1, 1, 2, 2]
    assert calibrations == [
        ("cpu", calibrate.AttentionShape(dtype=torch.bfloat16, **HEADS), True),
        ("cpu", calibrate.AttentionShape(dtype=torch.float32, **HEADS), False),
    ]
    logged = {
        record.getMessage()
        for record in caplog.records
        if record.name == auto.__name__ and "calibrated" in record.getMessage()
    }
    assert len(logged) == 2 and any("bfloat16, 4 heads (2 KV heads) of 16" in line for line in logged)


class OnCuda(LoopbackCommunicator):
    """A rank of a group that transfers from GPUs; ranks may exchange no CPU tensors but those of agreement."""

    device = torch.device("cuda")  # type: ignore[assignment]

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        return torch.stack(self.all_gather(torch.tensor(list(values)), "agreement")).tolist()

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        assert all(label == "agreement" or tensor.is_cuda for _, tensor, label in sends), sends
        return super().exchange(sends, recvs)


def test_patching_a_model_on_the_cpu_transfers_nothing_from_there() -> None:
    world = LoopbackWorld(2)
    run_loopback(2, lambda comm: patch_model(model_of("mplug_owl3", CASE), group=OnCuda(world, comm.rank), **AUTO))


def test_calibration_in_a_backward_pass_is_refused(calibrations: list[Any]) -> None:
    """There the ranks need not be at the same place."""
    selector = ClusterSelector(None, LoopbackCommunicator(LoopbackWorld(1), 0))
    x = torch.ones((), requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: selector.measured(grad.device, calibrate.AttentionShape()) and None)
    with pytest.raises(AssertionError, match="float32, 8 heads .* was requested in a backward pass"):
        y.backward()
    assert not calibrations


def test_ranks_that_ask_for_different_shapes_raise(calibrations: list[Any]) -> None:
    def run(comm: Any) -> None:
        with pytest.raises(AgreementError) as caught:
            shape = calibrate.AttentionShape(heads=8 * (1 + comm.rank))
            ClusterSelector(None, comm).measured(torch.device("cpu"), shape)
        assert "rank 1: float32, 16 heads" in str(caught.value)

    run_loopback(2, run)
    assert not calibrations


def test_links_are_measured_once_for_all_shapes() -> None:
    shapes = [
        calibrate.AttentionShape(heads=2, kv_heads=1, dim=8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    ]

    def run(comm: Any) -> list[Cluster]:
        selector = ClusterSelector(None, comm)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            return [selector.measured(torch.device("cpu"), shape) for shape in (*shapes, shapes[0])]

    first, second, again = run_loopback(2, run)[0]
    assert first is again and first.node_link == second.node_link and first.source != second.source


def test_every_available_kernel_is_timed() -> None:
    rates, same = run_loopback(2, lambda comm: calibrate.kernel_rates(comm, device="cpu", shape=SHAPE))
    assert rates == same and min(min(rate.forward, rate.backward) for rate in rates) > 0
    found = {(rate.kernel, rate.dim, rate.masked) for rate in rates}
    dims = {SHAPE.dim, *calibrate.HEAD_DIMS}
    assert found == set(itertools.product(("torch_cpu", "blocked_matmul"), dims, (False, True)))
    assert len(rates) == len(found)


def test_kernel_that_fails_on_one_rank_is_left_out_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = itertools.count(), TorchCpuKernel.forward

    def fails_once(*args: Any, **options: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("the operator is not built for this GPU")
        return original(*args, **options)

    monkeypatch.setattr(TorchCpuKernel, "forward", fails_once)
    for rates in run_loopback(2, lambda comm: calibrate.kernel_rates(comm, device="cpu", shape=SHAPE)):
        first = min(rate.dim for rate in rates)
        assert [rate.kernel for rate in rates if rate.dim == first and not rate.masked] == ["blocked_matmul"]


def kernels_of_a_step(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[set[tuple[str, bool]], float]:
    """Return the loss of a training step of 2 ranks, and the kernels with whether the mask was one but causal."""
    used: set[tuple[str, bool]] = set()
    running = threading.local()  # a kernel may call itself for a part of a block; ranks are threads
    for kernel in (TorchCpuKernel, BlockedMatmulKernel):

        def counted(self: Any, *args: Any, original: Any = kernel.forward, intervals: Any = None, **given: Any) -> Any:
            if not getattr(running, "inside", False):
                used.add((self.name, intervals is not None and not intervals.is_causal))
            before, running.inside = getattr(running, "inside", False), True
            try:
                return original(self, *args, intervals=intervals, **given)
            finally:
                running.inside = before

        monkeypatch.setattr(kernel, "forward", counted)

    def run(comm: Any) -> float:
        model = patch_model(model_of("mplug_owl3", CASE), group=comm, **options)
        loss = model(**inputs_of("mplug_owl3", CASE, model)).loss
        loss.backward()
        return loss.item()

    loss, same = run_loopback(2, run)
    assert loss == same
    monkeypatch.undo()
    return used, loss


@pytest.mark.parametrize("strategy", ["lv-xattn", "auto"])
def test_kernels_are_chosen_by_the_rates_of_the_cluster_file(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks without a mask, and causal ones, go to the kernel that the file says is faster; others to the only one."""
    rates = (
        ("blocked_matmul", 16, False, 2e9, 2e9),
        ("torch_cpu", 16, False, 1e9, 1e9),
        ("torch_cpu", 16, True, 1e9, 1e9),
    )
    write_cluster(replace(CLUSTER, kernels=rates), tmp_path / "here.yaml")
    given = {"strategy": strategy, "cluster": str(tmp_path / "here.yaml")}
    found, loss = kernels_of_a_step(monkeypatch, **given)
    assert found == {("blocked_matmul", False), ("torch_cpu", True)}
    plain, exact = kernels_of_a_step(monkeypatch)
    assert plain == {("torch_cpu", False), ("torch_cpu", True)} and loss == pytest.approx(exact, rel=1e-5)
    named = {"strategy": "auto", "cluster": str(tmp_path / "here.yaml"), "kernel": "torch_cpu"}
    assert kernels_of_a_step(monkeypatch, **named)[0] == plain


def test_cluster_file_with_an_unknown_kernel_is_refused(tmp_path: Path) -> None:
    write_cluster(replace(CLUSTER, kernels=(("torch_gpu", 16, False, 1e9, 1e9),)), tmp_path / "here.yaml")
    with pytest.raises(ConfigError, match="kernel='torch_gpu' does not exist; choose auto or one of"):
        patch_model(model_of("mplug_owl3", CASE), cluster=str(tmp_path / "here.yaml"))
