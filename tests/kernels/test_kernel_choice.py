"""Layer: one process. Which kernel is chosen, what it says about it, and what bad blocks and bad names are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import CPU_KERNELS, block

from attention_cases import Case, assert_exact, run_case
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.kernels import BlockKernel, available_kernels, choose_kernel, kernel_names, registry
from mllm_seqpar.kernels.blocked_matmul import BlockedMatmulKernel


def test_every_name_builds_a_kernel_of_that_name():
    b = block()
    for name in available_kernels():
        if name in CPU_KERNELS:
            kernel, reason = choose_kernel(name, b.q, b.k, causal=False, masked=False)
            assert isinstance(kernel, BlockKernel) and kernel.name == name and name in reason
    assert set(CPU_KERNELS) <= set(available_kernels()) <= set(kernel_names())


@pytest.mark.parametrize(("dtype", "chosen"), [(torch.float32, "torch_cpu"), (torch.float64, "tiled")])
def test_auto_on_cpu_takes_the_first_able_and_says_why(dtype, chosen):
    b = block(dtype=dtype)
    kernel, reason = choose_kernel("auto", b.q, b.k, causal=False, masked=True)
    assert kernel.name == chosen and reason.startswith(f"{chosen}: ")
    assert "needs CUDA" in reason
    assert ("torch_cpu computes in float32" in reason) == (chosen == "tiled")


def test_unknown_name_lists_the_choices():
    b = block()
    with pytest.raises(ConfigError, match=r"kernel='flash' does not exist; choose auto or one of .*torch_cpu"):
        choose_kernel("flash", b.q, b.k, causal=False, masked=False)


def test_unable_kernel_says_why_and_what_is_able():
    b = block(dtype=torch.float64)
    with pytest.raises(ConfigError, match="torch_cpu.*less than torch.float64; choose auto or one of tiled"):
        choose_kernel("torch_cpu", b.q, b.k, causal=False, masked=False)


class Maskless(BlockedMatmulKernel):
    """As FlashAttention: computes everything but what comes with a mask."""

    name = "maskless"

    def why_not(self, q, k, *, causal, masked):
        return "takes no mask" if masked else None

    def forward(self, q, k, v, *, scale, causal=False, mask=None):
        assert mask is None
        return super().forward(q, k, v, scale=scale, causal=causal)


MASKED = [Case(op="causal", text="padded left", rows=17, batch=2), Case(op="lv", mask="random")]


@pytest.mark.parametrize("case", MASKED)
def test_a_named_kernel_leaves_what_it_cannot_mask_to_auto(case, monkeypatch):
    """Which tiles need a mask differs by rank: refusing them there would leave the other ranks waiting."""
    monkeypatch.setitem(registry._KERNELS, "maskless", Maskless)
    b = block()
    kernel, reason = choose_kernel("maskless", b.q, b.k, causal=False, masked=True)
    assert kernel.name == "torch_cpu" and reason.startswith("maskless takes no mask; torch_cpu: ")
    case = replace(case, kernel="maskless", layout="contiguous")
    assert_exact(case, run_loopback(3, run_case, case))


def _change(**changes):
    b = block()
    for name, change in changes.items():
        setattr(b, name, change(getattr(b, name)))
    return b


BAD = {
    "multiple": _change(k=lambda x: x[:, [0, 0, 1]], v=lambda x: x[:, [0, 0, 1]]),
    "agree in batch": _change(k=lambda x: x[:1], v=lambda x: x[:1]),
    "one shape": _change(v=lambda x: x[:, :, 1:]),
    "one floating dtype": _change(v=lambda x: x.double()),
    "must be bool": _change(mask=lambda _: torch.zeros(2, 33, 70)),
    "mask must be": _change(mask=lambda _: torch.zeros(2, 70, 33, dtype=torch.bool)),
    "as many keys as rows": _change(causal=lambda _: True),
    "exclude each other": _change(causal=lambda _: True, mask=lambda _: torch.ones(1, 33, 70, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("message", BAD)
def test_bad_blocks_are_refused_by_every_kernel(name, message):
    b = BAD[message]
    kernel, _ = choose_kernel(name, block().q, block().k, causal=False, masked=False)
    with pytest.raises(ShapeError, match=message):
        kernel.forward(b.q, b.k, b.v, **b.how)
    with pytest.raises(ShapeError, match=message):
        kernel.backward(b.do, b.q, b.k, b.v, b.q, torch.zeros(b.q.shape[:3]), **b.how)


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_backward_refuses_rows_that_do_not_belong(name):
    b = block()
    kernel, _ = choose_kernel(name, b.q, b.k, causal=False, masked=False)
    o, lse = kernel.forward(b.q, b.k, b.v, **b.how)
    with pytest.raises(ShapeError, match="q's shape"):
        kernel.backward(b.do, b.q, b.k, b.v, o, lse[:, :, 1:], **b.how)
