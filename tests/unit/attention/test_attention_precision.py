"""Layer: one process. 16-bit inputs and extreme logits: the error to float64, and that it does not grow with n."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_cases import Case, errors, exact, inputs, run_case
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.kernels import registry
from mllm_seqpar.kernels.blocked_matmul import BlockedMatmulKernel
from tolerances import AGAINST_ONE_DEVICE, AGAINST_ONE_DEVICE_FLOAT32_PARTIALS, drift, relative_error

pytestmark = pytest.mark.rounding

NAMES = ("o", "dq", "dk", "dv")
FLOAT32_PARTIALS = ("torch_cpu", "blocked_matmul")


class Rounding(BlockedMatmulKernel):
    """Rounds the result of every block to the dtype of the inputs, as fused CUDA kernels do."""

    name = "rounding"

    def forward(self, q: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
        o, lse = super().forward(q, *args, **options)
        return o.to(q.dtype), lse

    def backward(self, do: Tensor, q: Tensor, *args, **options) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().backward(do, q, *args, **options)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@pytest.fixture(autouse=True)
def _rounding_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._KERNELS, "rounding", Rounding)


def bf16(op: str, kernel: str, accumulate: torch.dtype | None = torch.float32) -> Case:
    name, _, tile = op.partition(" ")
    return Case(
        **{"op": name, "tile": tuple(map(int, tile.split("x"))) if tile else None, "kernel": kernel},
        **{"heads": 16 if name == "ulysses" else 4, "rows": 128, "frames": 64, "tokens": 64, "dim": 32},
        **{"layout": "contiguous", "dtype": torch.bfloat16, "accumulate": accumulate},
    )


@cache
def found(case: Case, n: int) -> dict[str, float]:
    return errors(case, run_loopback(n, run_case, case))


@cache
def one_device() -> dict[str, float]:
    """The errors of torch's own bf16 attention on one device."""
    case = bf16("lv", "auto")
    x = {name: t.requires_grad_(name in "qkv") for name, t in inputs(case, case.rows).items()}
    o = scaled_dot_product_attention(x["q"], x["k"], x["v"], enable_gqa=True)
    o.backward(x["do"])
    reference = exact(case, 1)
    results = {"o": o, "dq": x["q"].grad, "dk": x["k"].grad, "dv": x["v"].grad}
    return {name: relative_error(result, reference[name]) for name, result in results.items()}


@pytest.mark.parametrize("n", [2, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", ["lv", "ring"])
@pytest.mark.parametrize("kernel", [*FLOAT32_PARTIALS, "rounding"])
def test_bf16_is_as_good_as_one_device_and_does_not_depend_on_the_ring(kernel: str, op: str, n: int) -> None:
    limit = AGAINST_ONE_DEVICE_FLOAT32_PARTIALS if kernel in FLOAT32_PARTIALS else AGAINST_ONE_DEVICE
    case = bf16(op, kernel)
    for name in NAMES:
        assert found(case, n)[name] <= limit * one_device()[name], name
        assert n == 2 or found(case, n)[name] <= 1.1 * found(case, 2)[name], name


@pytest.mark.slow
@pytest.mark.parametrize("op", ["mesh 4x4", "ulysses 2x2"])
def test_bf16_of_mesh_and_ulysses_on_16_ranks(op: str) -> None:
    case = bf16(op, "blocked_matmul")
    for name in NAMES:
        assert found(case, 16)[name] <= 1.1 * found(replace(case, tile=None), 1)[name], name


@pytest.mark.slow
def test_error_of_bf16_accumulation_grows_with_the_ring() -> None:
    """Why float32 is the default: with None, O (and the gradients) are rounded once per hop."""
    for op in ("lv", "ring"):
        few, many = (found(bf16(op, "blocked_matmul", None), n)["o"] for n in (2, 16))
        assert many > 1.3 * few and many > 1.5 * found(bf16(op, "blocked_matmul"), 16)["o"]


def test_bf16_errors_have_zero_mean() -> None:
    """A dropped or doubled key may be as small as rounding, but it shifts the mean."""
    case = bf16("lv", "auto")
    o = torch.cat([result["o"] for result in run_loopback(4, run_case, case)], dim=2)
    assert drift(o, exact(case, 4)["o"]) < 0.1


@pytest.mark.parametrize("op", ["lv", "ring", "joint"])
def test_extreme_logits(op: str) -> None:
    """exp(1e4) is infinite, exp(-1e4) is 0. A float32 log-sum-exp of 1e4 is known to 5e-4, and so are all weights."""
    case = Case(op=op, rows=24, frames=6, tokens=4, mask="random")
    for kernel in ("torch_cpu", "blocked_matmul", "reference"):
        around = replace(case, batch=2, offset=1e4, kernel=kernel)
        results = run_loopback(3, run_case, around)
        assert {float(x) for r in results for x in (r["lse"] / 1e4).round().unique()} >= {-1.0, 1.0}
        assert all(error < 5e-3 for error in errors(around, results).values()), (kernel, errors(around, results))
    # Logits that are far apart: weights of exactly 0 and 1. The output is one value, gradients of q and k are near 0.
    apart = replace(case, size=1e4, layout="contiguous")
    results = run_loopback(3, run_case, apart)
    assert all(bool(result[name].isfinite().all()) for result in results for name in NAMES)
    assert max(errors(apart, results)[name] for name in ("o", "dv")) < 1e-5
