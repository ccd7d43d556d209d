"""Layer: one process. Every kernel against dense float64 attention: block by block, and merged from two blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import Block, Dense, block, dense, kernel_for, on_every_kernel, sizes_of_terms
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_seqpar.kernels.base import BlockKernel
from mllm_seqpar.kernels.merge import merge_
from tolerances import (
    AGAINST_ONE_DEVICE,
    AGAINST_ONE_DEVICE_FLOAT32_PARTIALS,
    EXACT,
    drift,
    relative_error,
)

pytestmark = pytest.mark.rounding


def run(kernel: BlockKernel, b: Block) -> Dense:
    o, lse = kernel.forward(b.q, b.k, b.v, **b.how)
    return Dense(o, lse, *kernel.backward(b.do, b.q, b.k, b.v, o, lse, **b.how))


def run_in_two(kernel: BlockKernel, b: Block, cut: int) -> Dense:
    """Split the keys, merge the two outputs, and give each block's backward the merged o and lse."""
    halves = [
        Block(b.q, b.k[:, :, s], b.v[:, :, s], b.do, mask=None if b.mask is None else b.mask[:, :, s])
        for s in (slice(0, cut), slice(cut, None))
    ]
    wide = torch.float64 if b.q.dtype == torch.float64 else torch.float32
    o = torch.zeros(b.q.shape, dtype=wide, device=b.q.device)
    lse = torch.full(b.q.shape[:3], -torch.inf, dtype=wide, device=b.q.device)
    for half in halves:
        merge_(o, lse, *kernel.forward(half.q, half.k, half.v, **half.how))
    parts = [kernel.backward(h.do, h.q, h.k, h.v, o, lse, **h.how) for h in halves]
    dq = parts[0][0].to(wide) + parts[1][0].to(wide)
    return Dense(o, lse, dq, *(torch.cat([parts[0][i], parts[1][i]], dim=2) for i in (1, 2)))


def check(got: Dense, b: Block) -> None:
    exact, terms, bound = dense(b), sizes_of_terms(b), EXACT[b.q.dtype]
    assert got.lse.dtype == (torch.float64 if b.q.dtype == torch.float64 else torch.float32)
    assert got.lse.is_contiguous() and got.lse.shape == b.q.shape[:3] and got.o.shape == b.q.shape
    hidden = exact.lse == -torch.inf
    assert torch.equal(got.lse == -torch.inf, hidden)
    assert not got.o[hidden].any() and not got.dq[hidden].any()
    assert relative_error(got.lse[~hidden], exact.lse[~hidden], terms["lse"]) <= min(bound, 1e-3)
    for name in ("o", "dq", "dk", "dv"):
        value = getattr(got, name)
        assert value.isfinite().all(), name
        assert relative_error(value, getattr(exact, name), terms[name]) <= bound, name


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operator returns while this is active."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._given(args):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result

    @staticmethod
    def _given(args) -> set[int]:
        return {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}


KINDS = {"plain": {}, "causal": {"causal": True, "keys": 33}, "masked": {"masked": True}}


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2, 4, 7])
def test_grouped_heads(name, device, kind, groups):
    b = block(heads=28 if groups in (4, 7) else 4, groups=groups, device=device, **KINDS[kind])
    check(run(kernel_for(name, b), b), b)


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 72, 128])
def test_head_dims_and_dtypes(name, device, kind, dtype, dim):
    b = block(dim=dim, dtype=dtype, device=device, **KINDS[kind])
    check(run(kernel_for(name, b), b), b)


@on_every_kernel
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rows", "keys"), list(itertools.product([0, 1, 17, 129], repeat=2)))
def test_lengths(name, device, masked, rows, keys):
    b = block(rows=rows, keys=keys, masked=masked, device=device)
    check(run(kernel_for(name, b), b), b)


@on_every_kernel
@pytest.mark.parametrize("length", [0, 1, 17, 129, 700])
def test_causal_lengths(name, device, length):
    b = block(rows=length, keys=length, causal=True, batch=1, device=device)
    check(run(kernel_for(name, b), b), b)


@on_every_kernel
def test_several_tiles_with_a_mask_shared_by_the_batch(name, device):
    b = block(rows=300, keys=1500, masked=True, device=device)
    b.mask = b.mask[:1]
    b.mask[:, 40:60, :1100] = False  # whole tiles hidden for rows that later tiles show
    check(run(kernel_for(name, b), b), b)


@on_every_kernel
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cut", [1, 35, 69])
def test_backward_takes_the_merged_output(name, device, masked, cut):
    b = block(masked=masked, device=device)
    check(run_in_two(kernel_for(name, b), b, cut), b)


@on_every_kernel
def test_rows_that_only_the_other_block_sees(name, device):
    b = block(masked=True, device=device)
    b.mask[:, 1:8, :35] = False
    b.mask[:, 1:8, 35:] = True
    check(run_in_two(kernel_for(name, b), b, 35), b)


@on_every_kernel
def test_one_key_is_not_two(name, device):
    """A phantom key of score 0 would halve o: it hides among thousands of keys, not here."""
    b = block(rows=5, keys=1, size=0.01, device=device)
    o, lse = kernel_for(name, b).forward(b.q, b.k, b.v, **b.how)
    assert relative_error(o, b.v.repeat_interleave(2, dim=1).expand_as(o)) <= 1e-6
    assert lse.abs().max() < 0.1


@on_every_kernel
@pytest.mark.parametrize("masked", [False, True])
def test_logits_of_ten_thousand(name, device, masked):
    """exp overflows at 88; a kernel that forgets the maximum, or merges without it, gives inf or NaN."""
    b = block(size=4e3, masked=masked, device=device)
    for got in (run(kernel_for(name, b), b), run_in_two(kernel_for(name, b), b, 30)):
        assert got.lse[got.lse > -torch.inf].abs().max() > 1e4
        # At 1e4 a float32 score is right to 1e-3, and with it each probability: no kernel can do better.
        exact = dense(b)
        assert relative_error(got.o, exact.o) <= 1e-2
        for name_ in ("dq", "dk", "dv"):
            assert getattr(got, name_).isfinite().all()


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_views(name, device, kind):
    """Slices along the lengths, the (B, S, H, D) layout of projections, and a last dim that is not contiguous."""
    b = block(device=device, **KINDS[kind])
    kernel = kernel_for(name, b)
    wanted = run(kernel, b)
    padded = {x: F.pad(getattr(b, x), (0, 0, 3, 2))[:, :, 3:-2] for x in ("q", "k", "v", "do")}
    transposed = {x: getattr(b, x).transpose(1, 2).contiguous().transpose(1, 2) for x in ("q", "k", "v", "do")}
    strided = {x: getattr(b, x).mT.contiguous().mT for x in ("q", "k", "v", "do")}
    for views in (padded, transposed, strided):
        view = Block(**views, causal=b.causal, mask=b.mask)
        assert not all(getattr(view, x).is_contiguous() for x in views)
        got = run(kernel, view)
        for x in ("o", "lse", "dq", "dk", "dv"):
            torch.testing.assert_close(getattr(got, x), getattr(wanted, x), rtol=1e-5, atol=1e-5)


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_final_output_and_its_gradient_as_views(name, device, kind):
    b = block(device=device, **KINDS[kind])
    kernel = kernel_for(name, b)
    o, lse = kernel.forward(b.q, b.k, b.v, **b.how)
    wanted = kernel.backward(b.do, b.q, b.k, b.v, o, lse, **b.how)
    views = (b.do.mT.contiguous().mT, b.q, b.k, b.v, o.mT.contiguous().mT, lse.mT.contiguous().mT)
    for x, y in zip(kernel.backward(*views, **b.how), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_reach_inside(name, device, kind):
    """Models run attention under autocast; inputs that are float32 there stay float32 here."""
    b = block(device=device, **KINDS[kind])
    kernel = kernel_for(name, b)
    with torch.autocast(device, dtype=torch.bfloat16):
        check(run(kernel, b), b)


@pytest.mark.parametrize("name", ["blocked_matmul", "torch_cpu"])
@pytest.mark.parametrize("kind", ["plain", "causal", "masked"])
def test_scores_never_exist_beyond_a_tile(name, kind):
    """2,048 rows x 2,048 keys x 8 heads are 128 MiB of scores; a tile, and what is returned, are far less."""
    n = 2048
    b = block(batch=1, heads=8, groups=2, rows=n, keys=n, causal=kind == "causal", masked=kind == "masked")
    kernel = kernel_for(name, b)
    with LargestTensor() as largest:
        run(kernel, b)
    # The bool mask itself is n * n bytes.
    assert largest.bytes <= max(n * n, 4 * (1 << 20))


def test_long_keys_are_not_copied_to_float32_at_once():
    b = block(batch=1, heads=2, groups=2, rows=4, keys=20_000, dim=64, dtype=torch.bfloat16)
    kernel = kernel_for("torch_cpu", b)
    with LargestTensor() as largest:
        o, lse = kernel.forward(b.q, b.k, b.v, **b.how)
    assert largest.bytes <= 4 * b.k[:, :, :8192].numel()


@pytest.mark.parametrize("name", ["reference", "blocked_matmul", "torch_cpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_partial_results_on_cpu_are_float32(name, kind, dtype):
    b = block(dtype=dtype, **KINDS[kind])
    got = run(kernel_for(name, b), b)
    assert {x.dtype for x in (got.o, got.lse, got.dq, got.dk, got.dv)} == {torch.float32}


@on_every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_against_one_device(name, device, dtype):
    """Four blocks merged in float32 must be nearly as good as one call of the framework's own attention."""
    b = block(rows=64, keys=2048, dim=64, groups=4, dtype=dtype, device=device)
    kernel = kernel_for(name, b)
    exact = dense(b)
    one = [x.detach().requires_grad_() for x in (b.q, b.k, b.v)]
    o = F.scaled_dot_product_attention(*one)
    single = Dense(o, o, *torch.autograd.grad(o, one, b.do))

    pieces = [slice(i, i + 512) for i in range(0, 2048, 512)]
    merged_o = torch.zeros(b.q.shape, device=device)
    lse = torch.full(b.q.shape[:3], -torch.inf, device=device)
    parts = [kernel.forward(b.q, b.k[:, :, s], b.v[:, :, s], **b.how) for s in pieces]
    for part in parts:
        merge_(merged_o, lse, *part)
    grads = [kernel.backward(b.do, b.q, b.k[:, :, s], b.v[:, :, s], merged_o, lse, **b.how) for s in pieces]
    dq = torch.stack([g[0].float() for g in grads]).sum(0)
    dk, dv = (torch.cat([g[i] for g in grads], dim=2) for i in (1, 2))

    factor = AGAINST_ONE_DEVICE_FLOAT32_PARTIALS if parts[0][0].dtype == torch.float32 else AGAINST_ONE_DEVICE
    for name_, value in {"o": merged_o, "dq": dq, "dk": dk, "dv": dv}.items():
        ours, theirs = (relative_error(x.to(dtype), getattr(exact, name_)) for x in (value, getattr(single, name_)))
        assert ours <= factor * theirs, (name_, ours / theirs)
        assert drift(value, getattr(exact, name_)) < 0.1, name_


@on_every_kernel
def test_long_bf16_query_gradient(name, device):
    """dq summed over 16,384 keys in bf16 would lose a digit; summed over pieces in float32 it does not."""
    b = block(batch=1, heads=2, groups=1, rows=4, keys=16384, dim=64, dtype=torch.bfloat16, device=device)
    exact = dense(b)
    got = run(kernel_for(name, b), b)
    assert relative_error(got.dq, exact.dq) <= 8e-3
