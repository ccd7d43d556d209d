"""Layer: one process, no GPU. How the CUDA kernels use the results of their operators, emulated on the CPU.

`test_fake_cuda_kernels.py` runs the same kernels on the real schemas of torch.
"""

from __future__ import annotations

from types import SimpleNamespace

import emulated_cuda
import interpreted_triton
import pytest
import torch
from kernel_cases import KINDS, Block, block, check, dense, run, run_split

from mllm_seqpar.kernels import cudnn, flash_attn, kernel_by_name, torch_cuda
from tolerances import relative_error

pytestmark = pytest.mark.rounding

TORCH_KERNELS = (torch_cuda.CudaFlashKernel, torch_cuda.CudaEfficientKernel, cudnn.CudaCudnnKernel)
TORCH = {kernel.name: kernel for kernel in TORCH_KERNELS}


@pytest.fixture(params=[*TORCH, *emulated_cuda.PACKAGES])
def emulated(request, monkeypatch):
    if request.param in TORCH:
        for module in (torch_cuda, cudnn):
            monkeypatch.setattr(module, "_aten", emulated_cuda.aten)
        monkeypatch.setattr(cudnn, "multiprocessors", lambda x: 1)
        yield TORCH[request.param]()
    else:
        with emulated_cuda.installed(request.param):
            yield kernel_by_name(emulated_cuda.PACKAGES[request.param][0])


def kinds_of(kernel):
    return [kind for kind in KINDS if kind != "masked" or kernel.name == "cuda_efficient"]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_block_equals_dense_attention(emulated, groups):
    for kind in kinds_of(emulated):
        for keys in (33, 70, 2 if emulated.name == "cuda_cudnn" else 1, 0):
            b = block(groups=groups, dtype=torch.bfloat16, **{"keys": keys, **KINDS[kind]})
            check(run(emulated, b), b)


def test_backward_takes_a_merged_float32_output(emulated):
    b = block(dtype=torch.bfloat16, masked="masked" in kinds_of(emulated))
    check(run_split(emulated, b, 40), b)


def test_backward_of_rows_of_another_rank_has_the_error_of_their_o(emulated):
    """delta replaces o: the o that the operator is given has the row sums of the true one, to more than 16 bits."""
    for kind in kinds_of(emulated):
        b = block(groups=2, dtype=torch.bfloat16, **KINDS[kind])
        found, expected = (run(emulated, b, of_delta=x)[2:] for x in (True, False))
        for ours, with_o, right in zip(found, expected, dense(b)[2:], strict=True):
            assert relative_error(ours, right) <= 1.01 * relative_error(with_o, right), kind


@pytest.mark.parametrize("keys", [60, 63, 67])
def test_cudnn_divides_the_keys_for_few_rows(keys, monkeypatch):
    """Equal parts are items of a batch; a prime number of keys is computed as a whole."""
    monkeypatch.setattr(cudnn, "_aten", emulated_cuda.aten)
    monkeypatch.setattr(cudnn, "multiprocessors", lambda x: 6)
    monkeypatch.setattr(cudnn, "unsupported_device", lambda device: None)
    interpreted_triton.with_bfloat16(monkeypatch)
    b, kernel = block(batch=1, groups=2, keys=keys, dtype=torch.bfloat16), cudnn.CudaCudnnKernel()
    assert cudnn.parts_of_keys(b.q[:, :2], b.k) == {60: 3, 63: 3, 67: 1}[keys]
    check(run(kernel, b), b)


def test_unaligned_views_are_copied(emulated):
    b = block(dtype=torch.bfloat16)
    odd = Block(*(torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (b.q, b.k, b.v, b.do)))
    torch.testing.assert_close(run(emulated, odd), run(emulated, b))


def test_flash_attn_with_an_unknown_required_argument_is_rejected(monkeypatch):
    def future(q, k, v, dropout_p, softmax_scale, causal, sinks):
        raise AssertionError("must not be called")

    monkeypatch.setattr(flash_attn, "_functions", lambda version: SimpleNamespace(_flash_attn_forward=future))
    b = block(dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="needs sinks"):
        flash_attn.FlashAttnKernel().forward(b.q, b.k, b.v, **b.options)
