"""Layer: one process. Receive buffers that stay allocated: when they are reused, dropped and freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention_cases import Case, run_case, same_bits
from mllm_seqpar.comm import receive_buffers as module
from mllm_seqpar.comm.receive_buffers import BufferLease, ReceiveBuffers
from nccl_model import NcclCommunicator, run_nccl_model

LIKE = torch.empty(2, 3, 1, 4)
CASES = (
    Case(op="lv"),
    Case(op="ring"),
    Case(op="mesh", tile=(2, 2)),
    Case(op="lv", mask="far frame"),
    Case(op="joint", by="ring", mask="random", dtype=torch.bfloat16),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.mask} {case.dtype}")
def test_later_steps_allocate_no_receive_buffers(case: Case) -> None:
    def steps(comm: NcclCommunicator) -> list[tuple[int, int]]:
        sizes = []
        for _ in range(3):
            run_case(comm, case)
            sizes.append((comm.kept.buffers.allocations, comm.kept.buffers.nbytes))
        return sizes

    for sizes in run_nccl_model(4, steps):
        assert sizes[0] == sizes[1] == sizes[2] and sizes[0][0] > 0


def test_calls_of_several_shapes_share_buffers_with_the_results_of_separate_ones() -> None:
    """Short, long, forward only and other heads, one after the other on one communicator."""
    cases = [Case(op="lv"), Case(op="ring", rows=20), Case(op="mesh", tile=(2, 2), rows=8), Case(op="lv", heads=2)]

    def together(comm: NcclCommunicator) -> list[dict[str, Any]]:
        with torch.inference_mode():
            o = torch.randn(1, 2, 3, 8)
            from mllm_seqpar.attention import ring_attention

            ring_attention(o, o, o, group=comm)  # the first buffers come from inference mode
        return [run_case(comm, case) for case in [*cases, *reversed(cases)]]

    by_rank = run_nccl_model(4, together)
    for index, case in enumerate([*cases, *reversed(cases)]):
        assert same_bits([results[index] for results in by_rank], run_nccl_model(4, run_case, case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.mask} {case.dtype}")
def test_results_do_not_alias_receive_buffers(case: Case) -> None:
    def spoiled(comm: NcclCommunicator) -> dict[str, Any]:
        result = run_case(comm, case)
        spoil(comm.kept.buffers)
        return result

    assert same_bits(run_nccl_model(4, spoiled), run_nccl_model(4, run_case, case))


def spoil(buffers: ReceiveBuffers) -> None:
    for free in buffers.free.values():
        for *_, flat in free:
            flat.fill_(float("nan"))


def test_backward_of_one_call_runs_between_calls_of_another() -> None:
    def interleaved(comm: NcclCommunicator) -> list[torch.Tensor]:
        from mllm_seqpar.attention import lv_xattn, ring_attention

        x = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
        first = lv_xattn(*x, group=comm)
        spoil(comm.kept.buffers)
        second = ring_attention(*x.flip(3), group=comm)
        spoil(comm.kept.buffers)
        grads = [torch.autograd.grad(o.sum(), x)[0] for o in (first, second)]
        spoil(comm.kept.buffers)
        alone = [torch.autograd.grad(o.sum(), x)[0] for o in (lv_xattn(*x, group=comm.another("first")),)]
        alone.append(torch.autograd.grad(ring_attention(*x.flip(3), group=comm.another("second")).sum(), x)[0])
        return [a - b for a, b in zip(grads, alone, strict=True)]

    assert not any(difference.any() for rank in run_nccl_model(3, interleaved) for difference in rank)


def test_open_calls_never_share_a_buffer() -> None:
    buffers = ReceiveBuffers()
    with BufferLease(buffers) as outer:
        a = outer.take("kind", LIKE, 5)
        with BufferLease(buffers) as inner:
            b = inner.take("kind", LIKE, 5)
            assert a.data_ptr() != b.data_ptr()
        c = outer.take("kind", LIKE, 5)
        assert c.data_ptr() == b.data_ptr() and buffers.allocations == 2
        assert outer.take("other kind", LIKE, 5).data_ptr() not in (a.data_ptr(), c.data_ptr())
        assert outer.take("kind", LIKE.double(), 5).dtype == torch.float64
    assert buffers.nbytes == 5 * 24 * (3 * 4 + 8)


def test_longer_buffer_replaces_the_longest_that_is_too_short() -> None:
    buffers = ReceiveBuffers()
    for length in (2, 7, 3, 7, 1):
        with BufferLease(buffers) as lease:
            assert lease.take("kind", LIKE, length).shape == (2, 3, length, 4)
            assert lease.take("kind", LIKE, 0).numel() == 0
    assert buffers.allocations == 2 and buffers.nbytes == 7 * 24 * 4


def test_buffers_of_a_failed_call_are_not_reused() -> None:
    buffers, pointers = ReceiveBuffers(), []
    with BufferLease(buffers) as lease:
        lease.take("kind", LIKE, 5)
    with pytest.raises(RuntimeError, match="lost"), BufferLease(buffers) as lease:
        pointers.append(held := lease.take("kind", LIKE, 5))
        raise RuntimeError("lost a rank")
    assert buffers.nbytes == 0
    with BufferLease(buffers) as lease:
        assert lease.take("kind", LIKE, 5).data_ptr() != held.data_ptr() and buffers.allocations == 2


def test_buffers_are_freed_when_no_call_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_CALLS", 3)
    buffers = ReceiveBuffers()
    for length in (100, 1, 1, 1):
        with BufferLease(buffers) as lease:
            short = lease.take("short", LIKE, 1), lease.take("long", LIKE, 100) if length == 100 else None
        assert short[0].numel() and buffers.allocations == 2
    assert buffers.nbytes == 24 * 4
    with BufferLease(buffers) as lease:
        lease.take("short", LIKE, 1)
        buffers.clear()
    assert buffers.nbytes == 0
