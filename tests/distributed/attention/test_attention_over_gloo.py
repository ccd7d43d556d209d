"""Layer: gloo ranks. Distributed attention over real processes; tests/unit/attention sweeps everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_cases import OVER_TRANSPORTS, assert_counted, assert_exact, has_formula, over_gloo, same_bits
from attention_error_cases import caught
from mllm_seqpar.attention import lv_xattn, ulysses_attention
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.errors import AgreementError
from ranks import ranks

CASES = [case for sizes, case in OVER_TRANSPORTS if 3 in sizes]


@pytest.mark.rounding
def test_attention_over_gloo_is_exact_bit_identical_and_sends_the_bytes_of_the_formulas() -> None:
    n = 3
    first, second = (ranks(n).run(over_gloo, CASES) for _ in range(2))
    serial = ranks(n).run(over_gloo, [replace(case, overlap=False) for case in CASES])
    for i, case in enumerate(CASES):
        results = [rank[i] for rank in first]
        assert_exact(case, results)
        assert same_bits(results, [rank[i] for rank in second]) and same_bits(results, [rank[i] for rank in serial])
        if has_formula(case, n):
            assert_counted(case, n, results)


def disagree(rank: int, world: int) -> list[str]:
    """What each of three bad calls raises; the group works afterwards."""
    found = [type(caught(as_communicator(None), what)).__name__ for what in ("rows", "kernel", "scale")]
    q = torch.ones(1, 2, 3, 8)
    assert torch.allclose(lv_xattn(q, q, q), q)
    return found


def test_group_works_after_disagreements() -> None:
    *others, odd = ranks(3).run(disagree, timeout=60)
    assert others == [["AgreementError"] * 3] * 2 and odd == ["AgreementError", "ConfigError", "AgreementError"]


def inputs(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, 2, 3, 8, generator=generator), torch.randn(1, 2, 4, 8, generator=generator)


def keys_on_one_rank(rank: int, world: int) -> list[Tensor]:
    """Gradients of keys that rank 0 trains; rank 1 has no keys, and a query without a gradient."""
    found = []
    for attention in (lv_xattn, ulysses_attention):
        q, k = inputs(rank)
        k = k.requires_grad_() if rank == 0 else k[:, :, :0]
        attention(q, k, k * 1.0).sum().backward()
        assert not q.requires_grad and q.grad is None  # the caller's tensor stays as it is
        found.append(torch.zeros(()) if k.grad is None else k.grad)
    return found


def test_rank_without_trained_tensors_takes_part_in_backward() -> None:
    grads, _ = ranks(2).run(keys_on_one_rank, timeout=60)
    k = inputs(0)[1].double().requires_grad_()
    q = torch.cat([inputs(rank)[0] for rank in range(2)], dim=2).double()
    torch.nn.functional.scaled_dot_product_attention(q, k, k).sum().backward()
    for grad in grads:
        assert torch.allclose(grad.double(), k.grad, rtol=1e-4, atol=1e-5)


def one_rank_without_gradients(rank: int, world: int) -> None:
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    with torch.set_grad_enabled(rank == 0):
        lv_xattn(q, q, q)


def test_rank_without_grad_mode_is_named() -> None:
    for error in ranks(2).errors(one_rank_without_gradients, timeout=60):
        assert isinstance(error, AgreementError)
        assert "rank 1 of the group runs without gradients (torch.no_grad)" in str(error)
