"""Layer: one process. Replicated queries over sharded keys, as in decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import Case, frame_mask, inputs, visible_frames
from dense_attention import dense_attention
from mllm_seqpar.attention import decode_attention
from mllm_seqpar.attention.attend import SCATTER_ROWS, merge_over_ranks
from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError, MaskError, SeqParError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.projections import FunctionProjection
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache
from mllm_seqpar.sharding import FrameSizes, frame_range
from tolerances import EXACT, relative_error


def tensors(case: Case) -> list[Tensor]:
    whole = inputs(case, case.rows)
    return [whole[name] for name in "qkv"]


def run_decoding(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    q, k, v = tensors(case)
    frames = frame_range(case.frames, comm)
    keys = slice(frames.start * case.tokens, frames.stop * case.tokens)
    mask = frame_mask(case, case.rows, torch.arange(case.rows))
    with torch.no_grad():
        return decode_attention(q, k[:, :, keys], v[:, :, keys], group=comm, mask=mask, return_lse=True)


def assert_right(case: Case, results: list[tuple[Tensor, Tensor]]) -> None:
    o, lse = dense_attention(*tensors(case), visible_frames(case, case.rows), case.dim**-0.5)
    empty = lse == float("-inf")
    for found_o, found_lse in results:
        assert torch.equal(found_o, results[0][0]) and torch.equal(found_lse, results[0][1]), "the same bits everywhere"
        assert torch.equal(found_lse == float("-inf"), empty) and not found_o[empty].any()
        assert found_o.dtype is case.dtype and found_lse.dtype is torch.promote_types(case.dtype, torch.float32)
        assert relative_error(found_o, o) <= EXACT[case.dtype]
        assert relative_error(found_lse[~empty], lse[~empty]) <= EXACT[case.dtype]


CASES = [
    Case(op="decode", rows=rows, batch=2, frames=frames, tokens=tokens, mask=mask, shared_keys=mask == "own sample")
    for rows in (1, SCATTER_ROWS + 3)
    for frames, tokens, mask in (
        (7, 3, None),
        (1, 1, None),  # one key; the other ranks have none
        (0, 3, None),  # no key anywhere
        (7, 3, "own sample"),
        (5, 2, "holes"),
        (5, 2, "growing"),
        (5, 2, "nothing"),
    )
] + [Case(op="decode", rows=5, batch=2, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_decoding_equals_dense_attention_on_every_rank(case: Case, n: int) -> None:
    assert_right(case, run_loopback(n, run_decoding, case))


CASE = Case(op="decode", rows=1, batch=2)


def test_given_scale_replaces_the_default() -> None:
    q, k, v = tensors(CASE)
    exact, _ = dense_attention(q, k, v, visible_frames(CASE, 1), 0.5)
    found = decode_attention(q, k, v, scale=0.5)
    assert isinstance(found, Tensor) and relative_error(found, exact) <= EXACT[CASE.dtype]


def test_invalid_arguments_are_named() -> None:
    q, k, v = tensors(CASE)
    visible = torch.ones(2, 1, 9, dtype=torch.bool)
    nine, six = (FrameMask.from_dense(visible[..., :frames], 3) for frames in (9, 6))
    calls: dict[str, tuple[type[SeqParError], tuple[Tensor, ...], dict[str, Any]]] = {
        "decode_attention has no backward pass": (ConfigError, (q.clone().requires_grad_(), k, v), {}),
        "3 query heads cannot share 2": (ShapeError, (q[:, :3], k, v), {}),
        "expected a FrameMask or None, got Tensor": (MaskError, (q, k, v), {"mask": visible}),
        "of its 9 frames of 3 tokens this rank holds frames": (MaskError, (q, k, v), {"mask": nine}),
        "units_per_frame: 4 does not": (MaskError, (q, k[:, :, :9], v[:, :, :9]), {"mask": six, "units_per_frame": 4}),
        "scale: inf is invalid": (ConfigError, (q, k, v), {"scale": float("inf")}),
        "return_lse: None is invalid": (ConfigError, (q, k, v), {"return_lse": None}),
    }

    def run(comm: Communicator) -> None:
        for message, (kind, x, options) in calls.items():
            with pytest.raises(kind, match=message):
                decode_attention(*x, group=comm, **options)

    run_loopback(2, run)


def test_inputs_may_require_gradients_without_grad_mode() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(CASE))
    with torch.no_grad():
        assert not decode_attention(q, k, v).requires_grad


def test_few_rows_are_sent_to_all_ranks_at_once() -> None:
    """An all-gather of gloo is a ring, which takes the latency of n - 1 messages."""

    def run(comm: Communicator) -> tuple[int, int]:
        exchanges: list[int] = []
        exchange = comm.exchange

        def counted(sends: Any, recvs: Any) -> Any:
            exchanges.append(len(sends))
            return exchange(sends, recvs)

        comm.exchange, comm.all_gather = counted, None  # type: ignore[method-assign, assignment]
        o, lse = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3)
        merged, total = merge_over_ranks(o * comm.rank, lse, comm)
        torch.testing.assert_close(merged, torch.full_like(o, 1.5))
        torch.testing.assert_close(total, torch.full_like(lse, 4.0).log())
        assert comm.bytes.total == 3 * (o.numel() + lse.numel()) * 4
        return len(exchanges), exchanges[0]

    assert run_loopback(4, run) == [(1, 3)] * 4


def test_keys_that_all_rows_see_need_no_block_kernel() -> None:
    """Of one process, where nothing needs the log-sum-exp."""
    q, k, v = torch.randn(3, 4, 2, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    for visible, kernel, torch_attends in (
        ([1, 1, 1], "auto", True),
        ([1, 1, 0], "auto", True),
        ([1, 0, 1], "auto", False),
        ([1, 1, 0], "blocked_matmul", False),
    ):
        mask = FrameMask.from_dense(torch.tensor(visible).bool().expand(3, 2, 3), 2)
        context = SeqParContext(as_communicator("self"), SeqParConfig(kernel=kernel))
        cache = VisualKVCache(3, FrameSizes(3), 2)
        cache.states[0] = k, v
        state = ForwardState(context, frames=cache.frames_of(mask, context.comm), text_length=2)
        keys = state.frame_keys(q, 0, FunctionProjection(lambda *_: (k, v), []))
        assert (keys.torch_attend is not None) is torch_attends
        expected = decode_attention(q, k, v, mask=mask, scale=0.3, group="self")
        torch.testing.assert_close(state.attend(q, [keys], 0.3), expected)
