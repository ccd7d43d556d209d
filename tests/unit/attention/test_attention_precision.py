"""Layer: one process. 16-bit inputs and extreme logits: the error to float64, and that it does not grow with n."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_cases import Case, errors, exact, inputs, run_case
from mllm_seqpar.attention import attend
from mllm_seqpar.attention.call_spec import AccumulateDtype, call_spec_for, problem_of
from mllm_seqpar.attention.executor import BlockMath
from mllm_seqpar.attention.keys import GivenKeys
from mllm_seqpar.attention.ulysses import head_sharded
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.kernels import FinalRows, registry
from mllm_seqpar.kernels.base import output_with_row_sums
from mllm_seqpar.kernels.blocked_matmul import BlockedMatmulKernel
from mllm_seqpar.masks import BlockMasks
from mllm_seqpar.schedules.mesh_shapes import parallel_spec
from selections import slow_unless
from tolerances import AGAINST_ONE_DEVICE, AGAINST_ONE_DEVICE_FLOAT32_PARTIALS, DRIFT, drift, relative_error

pytestmark = pytest.mark.rounding

NAMES = ("o", "dq", "dk", "dv")
FLOAT32_PARTIALS = ("torch_cpu", "blocked_matmul")


class Rounding(BlockedMatmulKernel):
    """Takes o and no delta, and rounds o and all results to the dtype of the inputs, as fused CUDA kernels do."""

    name = "rounding"

    def forward(self, q: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
        o, lse = super().forward(q, *args, **options)
        return o.to(q.dtype), lse

    def backward(self, rows: FinalRows, k: Tensor, v: Tensor, **options):
        q, o, _, do, delta = rows
        o = output_with_row_sums(do, delta, q.dtype) if o is None else o.to(q.dtype)
        dq, dk, dv = super().backward(rows._replace(o=o, delta=None), k, v, **options)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@pytest.fixture(autouse=True)
def _rounding_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._KERNELS, "rounding", Rounding)


def bf16(op: str, kernel: str, accumulate: AccumulateDtype = "auto") -> Case:
    name, _, tile = op.partition(" ")
    return Case(
        **{"op": name, "tile": tuple(map(int, tile.split("x"))) if tile else None, "kernel": kernel},
        **{"heads": 8 if name == "ulysses" else 4, "rows": 128, "frames": 64, "tokens": 64, "dim": 32},
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


CASES = [(kernel, op, n) for kernel in ("torch_cpu", "rounding") for op in ("lv", "ring", "direct") for n in (2, 8)]
CASES += [("blocked_matmul", "lv", 8)]


@pytest.mark.parametrize(
    ("kernel", "op", "n"), slow_unless(lambda row: row in (("rounding", "lv", 2), ("rounding", "direct", 2)), CASES)
)
def test_bf16_is_as_good_as_one_device_and_does_not_depend_on_the_ring(kernel: str, op: str, n: int) -> None:
    limit = AGAINST_ONE_DEVICE_FLOAT32_PARTIALS if kernel in FLOAT32_PARTIALS else AGAINST_ONE_DEVICE
    case = bf16(op, kernel)
    for name in NAMES:
        assert found(case, n)[name] <= limit * one_device()[name], name
        few = found(replace(case, accumulate=case.accumulate if op == "direct" else torch.float32), 2)
        assert n == 2 or found(case, n)[name] <= (1.25 if op == "direct" else 1.1) * few[name], name


@pytest.mark.slow
@pytest.mark.parametrize("op", ["mesh 4x2", "ulysses 2x2"])
def test_bf16_of_mesh_and_ulysses_on_8_ranks(op: str) -> None:
    case = bf16(op, "blocked_matmul")
    whole = replace(case, accumulate=torch.float32)
    for name in NAMES:
        assert found(whole, 8)[name] <= 1.1 * found(replace(whole, tile=None), 1)[name], name
        assert found(case, 8)[name] <= AGAINST_ONE_DEVICE_FLOAT32_PARTIALS * one_device()[name], name


@pytest.mark.parametrize("n", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_rounding_results_once_costs_nothing_where_kernels_round_them(n: int) -> None:
    """Fused CUDA kernels return 16 bits; sent in float32, their results have the same error."""
    sent = [
        found(bf16(op, "rounding", accumulate), n) for op, accumulate in (("direct", "auto"), ("lv", torch.float32))
    ]
    for name in NAMES:
        assert sent[0][name] <= 1.02 * sent[1][name], name


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 8])
def test_rounded_gradients_of_shared_kv_heads_are_as_good_as_one_device(n: int) -> None:
    """Every rank has a part of dK and dV of the one KV head; they are added in float32."""
    case = replace(bf16("ulysses", "blocked_matmul"), groups=1, heads=8)
    whole = found(replace(case, accumulate=torch.float32), n)
    for name in ("dk", "dv"):
        assert whole[name] < found(case, n)[name] <= 1.6 * whole[name] <= 1.1 * one_device()[name], name


def joint_ulysses_dtypes(comm: Communicator) -> list[list[torch.dtype]]:
    """The dtypes that joint attention over head-sharded and other keys merges and adds; 2 ranks share one KV head."""
    whole_q, whole_k, whole_do = torch.randn(3, 1, 2, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = [x.double().requires_grad_() for x in (whole_q, whole_k[:, :1], whole_k[:, :1])]
    exact_o = scaled_dot_product_attention(*exact, scale=1.0, enable_gqa=True)
    exact_o.backward(whole_do.double())

    own = slice(4 * comm.rank, 4 * comm.rank + 4)
    q, do, k = (x[:, :, own].contiguous() for x in (whole_q, whole_do, whole_k[:, :1]))
    k.requires_grad_()
    problem, masks = problem_of(q.shape, k.shape, (4, 4), q.dtype, "auto"), BlockMasks.full(1, 4, (4, 4))
    specs = (parallel_spec(name, None, problem) for name in ("ulysses", "ring"))
    by_heads, ring = (call_spec_for(spec, masks, problem, torch.float32) for spec in specs)
    keys, layout = head_sharded(q, [GivenKeys(by_heads, k, k), GivenKeys(ring, k, k)], comm)
    assert layout is None and keys[0].row_layout is not None and keys[1].row_layout is None
    comm.bytes.reset()
    block_math, inputs = BlockMath("auto", 1.0), keys[0].inputs()
    o, lse = attend._forward(comm, block_math, [(keys[0], inputs)], q)
    rows = FinalRows(q, o.bfloat16(), lse, do)
    for_backward, saved = keys[0].for_backward(inputs)
    dq, grads = attend._backward(comm, block_math, for_backward, rows, saved, [True, True])

    sent = comm.bytes.sent
    assert sent["o"] == sent["dq"] == sent["q"] // 2 == sent["do"] == q.nbytes // 2, "sent in 16 bits; q twice"
    assert sent["dk"] == sent["dv"] == k.nbytes, "partial sums, in 16 bits"
    assert "k" not in sent, "saved head-sharded"
    references = [x[:, :, own] for x in (exact_o, *(x.grad for x in exact))]
    for found, reference in zip((o, dq, *grads), references, strict=True):
        assert relative_error(found, reference) < 0.01
    of_keys = keys[0].row_layout.gather_kv_grads(torch.ones(1, 1, 8, 8), torch.ones(1, 1, 8, 8), 1, q.dtype)
    assert all(bool((x == comm.size).all()) for x in of_keys), "each rank has a part of the one KV head"
    return [[x.dtype for x in (o, dq, *of_keys)], [x.dtype for x in grads if x is not None]]


def test_results_that_were_sent_in_16_bits_are_added_in_float32() -> None:
    """The caller adds o and dq of all sets of keys in their dtype; dk and dv are sums over the ranks."""
    assert run_loopback(2, joint_ulysses_dtypes) == [[[torch.float32] * 4, [torch.bfloat16] * 2]] * 2


def test_joint_softmax_adds_rounded_results_in_float32() -> None:
    """Head-sharded frames beside text: o and dq of the frames are rounded once, the sums over both are not."""
    case = replace(bf16("joint", "blocked_matmul"), by="ulysses", frames_by="lv-xattn", frames=16, tokens=16)
    for by in (case, replace(case, by="ring", frames_by="ulysses")):
        rounded, whole = found(by, 4), found(replace(by, accumulate=torch.float32), 4)
        for name in NAMES:
            assert rounded[name] <= 1.5 * whole[name] + 1e-4, (by, name)


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
    assert drift(o, exact(case, 4)["o"]) < DRIFT


@pytest.mark.parametrize("op", ["lv", "ring", "joint"])
def test_extreme_logits(op: str) -> None:
    """exp(1e4) is infinite, exp(-1e4) is 0. A float32 log-sum-exp of 1e4 is known to 5e-4, and so are all weights."""
    case = Case(op=op, rows=24, frames=6, tokens=4, mask="random")
    for kernel in ("torch_cpu", "blocked_matmul"):
        around = replace(case, batch=2, offset=1e4, kernel=kernel)
        results = run_loopback(3, run_case, around)
        assert {float(x) for r in results for x in (r["lse"] / 1e4).round().unique()} >= {-1.0, 1.0}
        assert all(error < 5e-3 for error in errors(around, results).values()), (kernel, errors(around, results))
    # Logits that are far apart: weights of exactly 0 and 1. The output is one value, gradients of q and k are near 0.
    apart = replace(case, size=1e4, layout="contiguous")
    results = run_loopback(3, run_case, apart)
    assert all(bool(result[name].isfinite().all()) for result in results for name in NAMES)
    assert max(errors(apart, results)[name] for name in ("o", "dv")) < 1e-5
