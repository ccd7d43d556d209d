"""Layer: one process. Accumulation of partial results: what is allocated, and what the first addition costs."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dense_attention import dense_attention
from mllm_seqpar.attention.call_spec import with_kernels
from mllm_seqpar.attention.executor import BlockMath, GradientAccumulator, PartialResult
from mllm_seqpar.kernels import FinalRows
from mllm_seqpar.masks.block_masks import decoder_mask


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_first_gradient_becomes_the_sum_without_zeros_and_addition(dtype: torch.dtype) -> None:
    first, second = torch.randn(2, 1, 2, 3, 4).to(dtype)
    total = GradientAccumulator(first, torch.float32)
    with Operators() as ran:
        total.add(first)
    assert not {"zeros", "zero_", "fill_", "add_", "add"} & set(ran.names)
    assert total.value.dtype == torch.float32 and torch.equal(total.value, first.float())
    expected = first.float() + second.float()
    total.add(second)
    assert torch.equal(total.value, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_first_gradient_of_some_rows_or_of_a_reused_buffer_is_copied(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 3, 4).to(dtype)
    borrowed, some = GradientAccumulator(x, torch.float32), GradientAccumulator(x, torch.float32)
    borrowed.add(x, borrowed=True)
    some.add(x[:, :, 1:2], rows=slice(1, 2))
    expected, part = x.float().clone(), torch.zeros(1, 2, 3, 4)
    part[:, :, 1:2] = expected[:, :, 1:2]
    x.fill_(float("nan"))
    assert torch.equal(borrowed.value, expected) and torch.equal(some.value, part)


def test_first_partial_result_is_converted_to_the_accumulation_dtype() -> None:
    o, lse = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 2, 3)
    total = PartialResult(o, torch.float32)
    with Operators() as ran:
        total.add(o, lse)
    assert not {"zeros", "zero_", "full", "fill_", "exp"} & set(ran.names)
    assert torch.equal(total.value[0], o.float()) and torch.equal(total.value[1], lse)


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([0, 2])], ids=["range", "indices"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_first_partial_result_of_some_rows_is_copied_without_a_merge(dtype: torch.dtype, rows: Any) -> None:
    like = torch.randn(1, 2, 3, 4).to(dtype)
    o, lse = torch.randn(1, 2, 2, 4).to(dtype), torch.randn(1, 2, 2)
    total, expected_o, expected_lse = (
        PartialResult(like, torch.float32),
        torch.zeros(1, 2, 3, 4),
        torch.full((1, 2, 3), -torch.inf),
    )
    expected_o[:, :, rows], expected_lse[:, :, rows] = o.float(), lse
    with Operators() as ran:
        total.add(o, lse, rows=rows, borrowed=True)
    assert not {"exp", "logaddexp", "lerp", "lerp_"} & set(ran.names)
    o.fill_(float("nan"))  # the buffer is reused
    assert torch.equal(total.value[0], expected_o) and torch.equal(total.value[1], expected_lse)
    total.add(expected_o[:, :, rows].clone(), expected_lse[:, :, rows].clone(), rows=rows)
    torch.testing.assert_close(total.value[0], expected_o)
    torch.testing.assert_close(total.value[1][:, :, rows], expected_lse[:, :, rows] + torch.log(torch.tensor(2.0)))


@pytest.mark.parametrize("seed", range(20))
def test_table_with_many_holes_is_one_call_on_the_cpu(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    visible = torch.rand(2, 9, 40, generator=g) < 0.5
    visible[:, 3] = False
    q, k, v, do = (torch.randn(2, heads, rows, 8, generator=g) for heads, rows in ((4, 9), (2, 40), (2, 40), (4, 9)))
    layers = with_kernels(decoder_mask(visible[:, None], 9, 40), q, k, "auto")
    assert len(layers) == 1
    block_math, out = BlockMath("auto", 0.3), PartialResult(q, torch.float32)
    block_math.forward(q, k, v, layers, out)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected, _ = dense_attention(*leaves, visible, 0.3)
    torch.testing.assert_close(out.value[0], expected.float())
    expected.backward(do.double())
    grads = tuple(GradientAccumulator(x, torch.float32) for x in (q, k, v))
    block_math.backward(grads, FinalRows(q, *out.value, do), k, v, layers)
    for total, leaf in zip(grads, leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(total.value, leaf.grad.float(), rtol=1e-4, atol=1e-5)
