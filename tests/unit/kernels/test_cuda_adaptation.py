"""Layer: one process, no GPU. How the CUDA kernels use the results of their operators, emulated on the CPU.

`test_fake_cuda_kernels.py` runs the same kernels on the real schemas of torch.
"""

from __future__ import annotations

from types import SimpleNamespace

import emulated_cuda
import pytest
import torch
from kernel_cases import KINDS, Results, block, dense, sizes_of_terms

from mllm_seqpar.kernels import flash_attn, kernel_by_name, torch_cuda
from mllm_seqpar.kernels.base import merge_, row_sums
from tolerances import EXACT, relative_error

pytestmark = pytest.mark.rounding

TORCH_KERNELS = (torch_cuda.CudaFlashKernel, torch_cuda.CudaEfficientKernel)
TORCH = {kernel.name: kernel for kernel in TORCH_KERNELS}


@pytest.fixture(params=[*TORCH, *emulated_cuda.PACKAGES])
def emulated(request, monkeypatch):
    if request.param in TORCH:
        monkeypatch.setattr(torch_cuda, "_aten", emulated_cuda.aten)
        yield TORCH[request.param]()
    else:
        with emulated_cuda.installed(request.param):
            yield kernel_by_name(emulated_cuda.PACKAGES[request.param][0])


def kinds_of(kernel):
    return [kind for kind in KINDS if kind != "masked" or kernel.name == "cuda_efficient"]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_block_equals_dense_attention(emulated, groups):
    for kind in kinds_of(emulated):
        for keys in (33, 70, 1, 0):
            b = block(groups=groups, dtype=torch.bfloat16, **{"keys": keys, **KINDS[kind]})
            o, lse = emulated.forward(b.q, b.k, b.v, **b.options)
            found = Results(o, lse, *emulated.backward(b.do, b.q, b.k, b.v, o, lse, **b.options))
            exact, terms = dense(b), sizes_of_terms(b)
            assert torch.equal(lse == -torch.inf, exact.lse == -torch.inf) and lse.is_contiguous()
            for name, value, right in zip(Results._fields, found, exact, strict=True):
                assert name == "lse" or relative_error(value, right, terms[name]) <= EXACT[torch.bfloat16], (kind, name)


def test_backward_takes_a_merged_float32_output(emulated):
    b = block(dtype=torch.bfloat16, masked="masked" in kinds_of(emulated))
    o, lse = torch.zeros(b.q.shape), torch.full(b.q.shape[:3], -torch.inf)
    parts = [b.part(0, 40), b.part(40, 70)]
    for part in parts:
        merge_(o, lse, *emulated.forward(part.q, part.k, part.v, **part.options))
    dq = sum(emulated.backward(b.do, b.q, part.k, part.v, o, lse, **part.options)[0].float() for part in parts)
    assert relative_error(o, dense(b).o) <= EXACT[torch.bfloat16]
    assert relative_error(dq, dense(b).dq) <= EXACT[torch.bfloat16]


def test_backward_of_rows_of_another_rank_has_the_error_of_their_o(emulated):
    """delta replaces o: the o that the operator is given has the row sums of the true one, to more than 16 bits."""
    for kind in kinds_of(emulated):
        b = block(groups=2, dtype=torch.bfloat16, **KINDS[kind])
        o, lse = emulated.forward(b.q, b.k, b.v, **b.options)
        o = o.to(b.q.dtype)
        expected = emulated.backward(b.do, b.q, b.k, b.v, o, lse, **b.options)
        found = emulated.backward(b.do, b.q, b.k, b.v, None, lse, delta=row_sums(b.do, o), **b.options)
        exact = dense(b)[2:]
        for ours, with_o, right in zip(found, expected, exact, strict=True):
            assert relative_error(ours, right) <= 1.01 * relative_error(with_o, right), kind


def test_unaligned_views_are_copied(emulated):
    b = block(dtype=torch.bfloat16)
    odd = {name: torch.nn.functional.pad(getattr(b, name), (1, 0))[..., 1:] for name in ("q", "k", "v", "do")}
    o, lse = emulated.forward(odd["q"], odd["k"], odd["v"], **b.options)
    grads = emulated.backward(odd["do"], odd["q"], odd["k"], odd["v"], o, lse, **b.options)
    expected = emulated.backward(b.do, b.q, b.k, b.v, *emulated.forward(b.q, b.k, b.v, **b.options), **b.options)
    torch.testing.assert_close(tuple(grads), tuple(expected))


def test_flash_attn_with_an_unknown_required_argument_is_rejected(monkeypatch):
    def future(q, k, v, dropout_p, softmax_scale, causal, sinks):
        raise AssertionError("must not be called")

    monkeypatch.setattr(flash_attn, "_flash2", lambda: SimpleNamespace(_flash_attn_forward=future))
    b = block(dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="needs sinks"):
        flash_attn.FlashAttnKernel().forward(b.q, b.k, b.v, **b.options)
