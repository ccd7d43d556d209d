"""Layer: one process. Which kernel is chosen and why, and errors for invalid blocks and names."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CPU_KERNELS, CUDA_KERNELS, block

from mllm_seqpar.attention import lv_xattn
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import BlockKernel, available_kernels, choose_kernel, kernel_names, registry
from mllm_seqpar.kernels.blocked_matmul import BlockedMatmulKernel
from mllm_seqpar.masks import FrameMask


def test_every_name_gives_a_kernel_of_that_name():
    b = block()
    for name in CPU_KERNELS:
        kernel, reason = choose_kernel(name, b.q, b.k)
        assert isinstance(kernel, BlockKernel) and kernel.name == name and name in reason
    assert set(CPU_KERNELS) <= set(available_kernels()) <= set(kernel_names())


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "torch_cpu"), (torch.float64, "blocked_matmul")])
def test_auto_selects_first_supported_kernel_and_gives_reason(dtype, name):
    b = block(dtype=dtype, masked=True)
    kernel, reason = choose_kernel("auto", b.q, b.k, b.intervals)
    assert kernel.name == name and reason.startswith(f"{name}: ")
    assert ("torch_cpu computes in float32" in reason) == (name == "blocked_matmul")


def test_name_that_cannot_be_used_is_rejected_with_the_choices():
    b = block(dtype=torch.float64)
    for name, message in {
        "flash": r"kernel='flash' does not exist; choose auto or one of .*torch_cpu",
        "torch_cpu": "torch_cpu.*less precise than torch.float64; choose auto or one of blocked_matmul",
        **{name: f"{name}.*needs .*GPU|{name}.*needs CUDA" for name in CUDA_KERNELS[1:]},
    }.items():
        with pytest.raises(ConfigError, match=message):
            choose_kernel(name, b.q, b.k)


class Maskless(BlockedMatmulKernel):
    """Takes no mask, like FlashAttention."""

    name = "maskless"

    def unsupported_reason(self, q, k, intervals=None):
        return "takes no mask" if intervals is not None else None

    def forward(self, q, k, v, *, scale, intervals=None):
        assert intervals is None
        return super().forward(q, k, v, scale=scale)


def test_masked_blocks_of_a_kernel_without_masks_go_to_auto(monkeypatch):
    """Which blocks need a mask differs between ranks: an error on some ranks would leave the others waiting."""
    monkeypatch.setitem(registry._KERNELS, "maskless", Maskless)
    b = block(masked=True)
    kernel, reason = choose_kernel("maskless", b.q, b.k, b.intervals)
    assert kernel.name == "torch_cpu" and reason.startswith("maskless takes no mask; torch_cpu: ")
    b = block(rows=12, keys=18)
    visible = torch.rand(2, 12, 6) < 0.5

    def run(comm, kernel):
        rows, keys = slice(4 * comm.rank, 4 * comm.rank + 4), slice(6 * comm.rank, 6 * comm.rank + 6)
        mask = FrameMask.from_dense(visible[:, rows], 3)
        return lv_xattn(b.q[:, :, rows], b.k[:, :, keys], b.v[:, :, keys], mask=mask, group=comm, kernel=kernel)

    for found, expected in zip(run_loopback(3, run, "maskless"), run_loopback(3, run, "blocked_matmul"), strict=True):
        torch.testing.assert_close(found, expected)
