"""Layer: one process. The rates of all kernels that `mllm-seqpar calibrate` prints."""

from __future__ import annotations

import itertools

import pytest

from mllm_seqpar.__main__ import main
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.kernels.torch_cpu import TorchCpuKernel
from mllm_seqpar.planner.calibrate import AttentionShape, kernel_rates

SHAPE = AttentionShape(heads=2, kv_heads=1, dim=16)


def test_every_available_kernel_is_timed():
    rates, same = run_loopback(2, lambda comm: kernel_rates(comm, device="cpu", shape=SHAPE))
    assert rates == same and rates.keys() == {"torch_cpu", "blocked_matmul"}
    assert list(rates.values()) == sorted(rates.values(), reverse=True) and min(rates.values()) > 0


def test_kernel_that_fails_on_one_rank_is_left_out_on_all(monkeypatch):
    calls, original = itertools.count(), TorchCpuKernel.forward

    def fails_once(*args, **options):
        if next(calls) == 0:
            raise RuntimeError("the operator is not built for this GPU")
        return original(*args, **options)

    monkeypatch.setattr(TorchCpuKernel, "forward", fails_once)
    for rates in run_loopback(2, lambda comm: kernel_rates(comm, device="cpu", shape=SHAPE)):
        assert rates.keys() == {"blocked_matmul"}


def test_calibrate_prints_the_rates(tmp_path, capsys: pytest.CaptureFixture[str]):
    arguments = ["calibrate", "--device", "cpu", "--heads", "4", "--dim", "32", "--output", str(tmp_path / "here.yaml")]
    assert main(arguments) == 0
    assert "kernel torch_cpu: " in capsys.readouterr().err
