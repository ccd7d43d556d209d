"""Layer: one process, no GPU. Our half of the CUDA kernels: what operators are given, what is made of their results.

Two checks: against the operators' contracts computed on CPU (`emulated_cuda`), and against the real schemas and shape
functions of the installed torch, on meta tensors, so that a release that changes one of them is noticed without a GPU.
"""

from __future__ import annotations

import emulated_cuda
import pytest
import torch
from kernel_cases import block, dense, sizes_of_terms

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import choose_kernel, flash_attn, torch_cuda
from mllm_seqpar.kernels.merge import merge_
from tolerances import EXACT, relative_error

pytestmark = pytest.mark.rounding

TORCH = {
    "cuda_flash": torch_cuda.CudaFlashKernel,
    "cuda_efficient": torch_cuda.CudaEfficientKernel,
    "cuda_cudnn": torch_cuda.CudaCudnnKernel,
}
EMULATED = [*TORCH, "flash_attn 2.6", "flash_attn 2.8"]
KINDS = {"plain": {}, "causal": {"causal": True, "keys": 33}, "masked": {"masked": True}}


@pytest.fixture
def emulated(request, monkeypatch):
    name = request.param
    if name in TORCH:
        monkeypatch.setattr(torch_cuda, "_aten", emulated_cuda.aten)
        torch_cuda._cudnn_lse_dims.cache_clear()
        yield TORCH[name]()
        torch_cuda._cudnn_lse_dims.cache_clear()
    else:
        release = emulated_cuda.FlashAttn26 if name.endswith("2.6") else emulated_cuda.FlashAttn28
        monkeypatch.setattr(flash_attn, "_interface", lambda: release)
        yield flash_attn.FlashAttnKernel()


def _takes_masks(kernel):
    return kernel.name == "cuda_efficient"


@pytest.mark.parametrize("emulated", EMULATED, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("keys", [33, 70, 1, 0])
def test_one_block(emulated, kind, groups, keys):
    if kind == "masked" and not _takes_masks(emulated):
        pytest.skip("takes no mask")
    b = block(groups=groups, dtype=torch.bfloat16, **{"keys": keys, **KINDS[kind]})
    o, lse = emulated.forward(b.q, b.k, b.v, **b.how)
    grads = emulated.backward(b.do, b.q, b.k, b.v, o, lse, **b.how)
    exact = dense(b)
    assert torch.equal(lse == -torch.inf, exact.lse == -torch.inf) and lse.is_contiguous()
    terms = sizes_of_terms(b)
    for name, value in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
        assert relative_error(value, getattr(exact, name), terms[name]) <= EXACT[torch.bfloat16], name


@pytest.mark.parametrize("emulated", EMULATED, indirect=True)
def test_merged_backward_and_float32_output(emulated):
    masked = _takes_masks(emulated)
    b = block(dtype=torch.bfloat16, masked=masked)
    o, lse = torch.zeros(b.q.shape), torch.full(b.q.shape[:3], -torch.inf)
    halves = [(s, None if b.mask is None else b.mask[:, :, s]) for s in (slice(0, 40), slice(40, None))]
    scale = b.how["scale"]
    for s, mask in halves:
        merge_(o, lse, *emulated.forward(b.q, b.k[:, :, s], b.v[:, :, s], scale=scale, mask=mask))
    dq = sum(
        emulated.backward(b.do, b.q, b.k[:, :, s], b.v[:, :, s], o, lse, scale=scale, mask=mask)[0].float()
        for s, mask in halves
    )
    assert relative_error(o, dense(b).o) <= EXACT[torch.bfloat16]
    assert relative_error(dq, dense(b).dq) <= EXACT[torch.bfloat16]


@pytest.mark.parametrize("emulated", EMULATED, indirect=True)
def test_views_that_vectors_cannot_read(emulated):
    b = block(dtype=torch.bfloat16)
    odd = {name: torch.nn.functional.pad(getattr(b, name), (1, 0))[..., 1:] for name in ("q", "k", "v", "do")}
    o, lse = emulated.forward(odd["q"], odd["k"], odd["v"], **b.how)
    grads = emulated.backward(odd["do"], odd["q"], odd["k"], odd["v"], o, lse, **b.how)
    wanted = emulated.backward(b.do, b.q, b.k, b.v, *emulated.forward(b.q, b.k, b.v, **b.how), **b.how)
    for x, y in zip(grads, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("kind", KINDS)
def test_real_schemas_on_meta_tensors(name, kind):
    kernel = TORCH[name]()
    if kind == "masked" and not _takes_masks(kernel):
        pytest.skip("takes no mask")
    b = block(dtype=torch.bfloat16, **KINDS[kind])
    q, k, v, do = (x.to("meta") for x in (b.q, b.k, b.v, b.do))
    how = {**b.how, "mask": None if b.mask is None else b.mask.to("meta")}
    o, lse = kernel.forward(q, k, v, **how)
    assert o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = kernel.backward(do, q, k, v, o, lse, **how)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", [*TORCH, "flash_attn"])
def test_without_a_gpu_the_reason_is_the_device(name):
    b = block()
    with pytest.raises(ConfigError, match=f"{name}.*needs .*GPU|{name}.*needs CUDA"):
        choose_kernel(name, b.q, b.k, causal=False, masked=False)


def test_flash_attn_of_an_unknown_release_is_refused(monkeypatch):
    class Future:
        @staticmethod
        def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, sinks):
            raise AssertionError("must not be called")

    monkeypatch.setattr(flash_attn, "_interface", lambda: Future)
    b = block(dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="wants sinks"):
        flash_attn.FlashAttnKernel().forward(b.q, b.k, b.v, **b.how)
