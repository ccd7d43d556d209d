"""Layer: one process. Every kernel against dense float64 attention, as one block and merged from two; the merge."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import KINDS, Block, Results, block, check, dense, kernel_for, on_every_kernel, run, run_split
from torch import Tensor
from torch.nn import functional as F

from memory_meters import Peak
from mllm_seqpar.kernels.base import FinalRows, merge
from mllm_seqpar.kernels.blocked_matmul import BlockedMatmulKernel
from mllm_seqpar.masks import Intervals
from tolerances import AGAINST_ONE_DEVICE, AGAINST_ONE_DEVICE_FLOAT32_PARTIALS, DRIFT, drift, relative_error

pytestmark = pytest.mark.rounding


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads_with_and_without_autocast(name, device, kind):
    for heads, groups in ((4, 1), (4, 2), (4, 4), (28, 4)):
        b = block(heads=heads, groups=groups, device=device, **KINDS[kind])
        check(run(kernel_for(name, b), b), b)
    with torch.autocast(device, dtype=torch.bfloat16):
        check(run(kernel_for(name, b), b), b)


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_head_dims_and_dtypes(name, device, kind, dtype):
    for dim in (16, 64, 72, 128):
        b = block(dim=dim, dtype=dtype, device=device, **KINDS[kind])
        found = run(kernel_for(name, b), b)
        check(found, b)
        if device == "cpu" and dtype.itemsize == 2:
            assert {x.dtype for x in found} == {torch.float32}, "partial results are not rounded"


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(name, device, kind):
    sizes = [(n, n) for n in (0, 1, 17, 129, 520)] if kind == "causal" else itertools.product([0, 1, 17, 129], repeat=2)
    for rows, keys in sizes:
        b = block(device=device, **{**KINDS[kind], "rows": rows, "keys": keys})
        check(run(kernel_for(name, b), b), b)


@on_every_kernel
def test_mask_shared_by_the_batch_over_several_chunks(name, device):
    b = block(heads=8, rows=140, keys=1100, dim=8, masked=True, device=device)
    low, high = b.intervals.low[:1].clone(), b.intervals.high[:1].clone()
    low[:, 40:60], high[:, 40:60] = 1030, 1090  # whole chunks are hidden from rows that see later ones
    b.intervals = Intervals(low, high, 1100)
    check(run(kernel_for(name, b), b), b)


@on_every_kernel
@pytest.mark.parametrize("masked", [False, True])
def test_backward_takes_the_merged_output(name, device, masked):
    b = block(masked=masked, device=device)
    if masked:  # rows that attend to nothing of the first 35 keys and everything of the others
        low, high = b.intervals.low.clone(), b.intervals.high.clone()
        low[:, 1:8], high[:, 1:8] = 35, 70
        b.intervals = Intervals(low, high, 70)
    for cut in (1, 35, 69):
        check(run_split(kernel_for(name, b), b, cut), b)


@on_every_kernel
@pytest.mark.parametrize("masked", [False, True])
def test_logits_of_ten_thousand_do_not_overflow(name, device, masked):
    b = block(size=4e3, masked=masked, device=device)
    exact = dense(b)
    for found in (run(kernel_for(name, b), b), run_split(kernel_for(name, b), b, 30)):
        assert found.lse[found.lse > -torch.inf].abs().max() > 1e4
        # A float32 score of 1e4 is exact to 1e-3, and so is each probability: no kernel can do better.
        assert relative_error(found.o, exact.o) <= 1e-2
        assert all(x.isfinite().all() for x in (found.dq, found.dk, found.dv))


@on_every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_be_views(name, device, kind):
    """Slices along the lengths, the (B, S, H, D) layout of projections, and a last dim that is not contiguous."""
    b = block(device=device, **KINDS[kind])
    kernel = kernel_for(name, b)
    expected = run(kernel, b)
    for view in (
        lambda x: F.pad(x, (0, 0, 3, 2))[:, :, 3:-2],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
    ):
        views = {x: view(getattr(b, x)) for x in ("q", "k", "v", "do")}
        assert not all(x.is_contiguous() for x in views.values())
        found = run(kernel, Block(**views, intervals=b.intervals))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    rows = FinalRows(b.q, *(x.mT.contiguous().mT for x in (expected.o, expected.lse, b.do)))
    found = kernel.backward(rows, b.k, b.v, **b.options)
    torch.testing.assert_close(tuple(found), expected[2:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["blocked_matmul", "torch_cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_large_tensors_are_never_allocated_as_a_whole(name, kind):
    """1,024 rows x 1,024 keys x 8 heads are 32 MiB of scores; a chunk, and what is returned, are far less."""
    b = block(batch=1, heads=8, groups=2, rows=1024, **{**KINDS[kind], "keys": 1024})
    with Peak(b.q, b.k, b.v, b.do) as found:
        run(kernel_for(name, b), b)
    assert found.largest <= 4 * (1 << 20)
    if (name, kind) == ("torch_cpu", "plain"):  # long keys are converted to float32 in chunks
        b = block(batch=1, heads=2, groups=2, rows=4, keys=20_000, dim=64, dtype=torch.bfloat16)
        with Peak(b.q, b.k, b.v) as found:
            kernel_for(name, b).forward(b.q, b.k, b.v, **b.options)
        assert found.largest <= 4 * b.k[:, :, :8192].numel()


@on_every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_error_is_near_that_of_one_device(name, device, dtype):
    """Four blocks merged in float32 must be nearly as good as one call of the framework's own attention."""
    b = block(rows=64, keys=2048, dim=64, groups=4, dtype=dtype, device=device)
    kernel = kernel_for(name, b)
    leaves = [x.detach().requires_grad_() for x in (b.q, b.k, b.v)]
    o = F.scaled_dot_product_attention(*leaves)
    one_device = Results(o, o, *torch.autograd.grad(o, leaves, b.do))
    float32 = kernel.forward(b.q, b.k[:, :, :512], b.v[:, :, :512], **b.options)[0].dtype == torch.float32
    factor = AGAINST_ONE_DEVICE_FLOAT32_PARTIALS if float32 else AGAINST_ONE_DEVICE
    found = run_split(kernel, b, 512, 1024, 1536)
    for x, value, alone, exact in zip(Results._fields, found, one_device, dense(b), strict=True):
        if x != "lse":
            error, allowed = relative_error(value.to(dtype), exact), relative_error(alone.to(dtype), exact)
            assert error <= factor * allowed, (x, error / allowed)
            assert drift(value, exact) < DRIFT, x


@on_every_kernel
def test_bf16_query_gradient_over_long_keys_is_summed_in_float32(name, device):
    b = block(batch=1, heads=2, groups=1, rows=4, keys=16384, dim=64, dtype=torch.bfloat16, device=device)
    assert relative_error(run(kernel_for(name, b), b).dq, dense(b).dq) <= 8e-3


Partial = tuple[Tensor, Tensor]


def partials(sizes: tuple[int, ...], offset: float = 0.0) -> tuple[list[Partial], Partial]:
    """Return partial results in float64 over parts of the keys, and the result over all keys."""
    q, k, v = (torch.randn(1, 2, rows, 4, dtype=torch.float64) for rows in (5, sum(sizes), sum(sizes)))
    forward = BlockedMatmulKernel().forward
    parts = [forward(q, *kv, scale=1.0) for kv in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)]
    o, lse = forward(q, k, v, scale=1.0)
    return [(o, lse + offset) for o, lse in parts], (o, lse + offset)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_merge_is_associative_and_commutative(offset):
    parts, (o, lse) = partials((1, 3, 2), offset)
    for a, b, c in itertools.permutations(parts):
        for found in (merge(merge(a, b), c), merge(a, merge(b, c))):
            assert relative_error(found[0], o) < 1e-10 and relative_error(found[1], lse) < 1e-12


def test_rows_that_see_nothing_and_much_smaller_partials_are_neutral():
    (some,), _ = partials((3,))
    nothing = torch.zeros_like(some[0]), torch.full_like(some[1], -torch.inf)
    pairs = [(nothing, some), (nothing, nothing)]
    for gap in (200.0, 1e4, 3e38):
        pairs.append(tuple((torch.full((2, 4), x), torch.full((2,), x + y)) for x, y in ((1.0, -gap), (2.0, gap))))
    for small, large in pairs:
        for found in (merge(small, large), merge(large, small)):
            assert torch.equal(found[0], large[0]) and torch.equal(found[1], large[1])


def test_16_bit_partials_are_merged_in_float32():
    parts, _ = partials((4, 4))
    rounded = [(o.bfloat16(), lse.float()) for o, lse in parts]
    found = merge(*rounded)
    assert found[0].dtype is torch.bfloat16 and found[1].dtype is torch.float32
    wide = merge(*((o.float(), lse) for o, lse in rounded))
    assert torch.equal(found[0], wide[0].bfloat16()), "one rounding, at the end"
    assert merge(rounded[0], (rounded[1][0].float(), rounded[1][1]))[0].dtype is torch.float32
