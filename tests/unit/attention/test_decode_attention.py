"""Layer: one process. Replicated queries over sharded keys, as in decoding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dense_attention import dense_attention
from mllm_seqpar.attention import decode_attention
from mllm_seqpar.attention.decode import SCATTER_ROWS
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import ConfigError, MaskError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.sharding import frame_range
from tolerances import EXACT, relative_error


@dataclass(frozen=True)
class Decoding:
    rows: int = 1
    batch: int = 2
    key_batch: int = 2
    frames: int = 7
    tokens: int = 3
    mask: str | None = None
    dtype: torch.dtype = torch.float32


def tensors(case: Decoding) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(case.batch, 4, case.rows, 8, generator=generator)
    k, v = torch.randn(2, case.key_batch, 2, case.frames * case.tokens, 8, generator=generator)
    return q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)


def table(case: Decoding) -> Tensor | None:
    """(B, rows, F) bool."""
    row, frame = torch.arange(case.rows), torch.arange(case.frames)
    match case.mask:
        case None:
            return None
        case "own sample":  # frames of all samples in one list; each attends to its own
            mine = torch.arange(case.frames) * case.batch // case.frames == torch.arange(case.batch)[:, None]
            return mine[:, None].expand(-1, case.rows, -1)
        case "growing":
            return (frame < (row % (case.frames + 1))[:, None]).expand(case.batch, -1, -1)
        case "nothing":
            return torch.zeros(case.batch, case.rows, case.frames, dtype=torch.bool)
    raise ValueError(case.mask)


def run_decoding(comm: Communicator, case: Decoding) -> tuple[Tensor, Tensor]:
    q, k, v = tensors(case)
    frames = frame_range(case.frames, comm)
    keys = slice(frames.start * case.tokens, frames.stop * case.tokens)
    visible = table(case)
    mask = None if visible is None else FrameMask.from_dense(visible, case.tokens)
    with torch.no_grad():
        return decode_attention(q, k[:, :, keys], v[:, :, keys], group=comm, mask=mask, return_lse=True)


def assert_right(case: Decoding, results: list[tuple[Tensor, Tensor]]) -> None:
    visible = table(case)
    q, k, v = tensors(case)
    o, lse = dense_attention(q, k, v, None if visible is None else visible.repeat_interleave(case.tokens, -1), 8**-0.5)
    empty = lse == float("-inf")
    for found_o, found_lse in results:
        assert torch.equal(found_o, results[0][0]) and torch.equal(found_lse, results[0][1]), "the same bits everywhere"
        assert torch.equal(found_lse == float("-inf"), empty) and not found_o[empty].any()
        assert found_o.dtype is case.dtype and found_lse.dtype is torch.promote_types(case.dtype, torch.float32)
        assert relative_error(found_o, o) <= EXACT[case.dtype]
        assert relative_error(found_lse[~empty], lse[~empty]) <= EXACT[case.dtype]


MANY = SCATTER_ROWS + 3
CASES = [
    Decoding(rows=rows, frames=frames, tokens=tokens, mask=mask, key_batch=key_batch)
    for rows in (1, MANY)
    for frames, tokens, mask, key_batch in (
        (7, 3, None, 2),
        (1, 1, None, 2),  # one key; the other ranks have none
        (0, 3, None, 2),  # no key anywhere
        (7, 3, "own sample", 1),
        (5, 2, "growing", 2),
        (5, 2, "nothing", 2),
    )
] + [Decoding(rows=5, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_decoding_equals_dense_attention_on_every_rank(case: Decoding, n: int) -> None:
    assert_right(case, run_loopback(n, run_decoding, case))


def attempt(comm: Communicator, what: str) -> str:
    q, k, v = tensors(Decoding())
    try:
        if what == "gradients":
            decode_attention(q.requires_grad_(), k, v, group=comm)
        elif what == "heads":
            decode_attention(q[:, :3], k, v, group=comm)
        elif what == "mask type":
            decode_attention(q, k, v, group=comm, mask=torch.ones(2, 1, 9, dtype=torch.bool))
        else:
            decode_attention(q, k, v, group=comm, mask=FrameMask.from_dense(torch.ones(2, 1, 9, dtype=torch.bool), 3))
    except (ConfigError, ShapeError, MaskError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    "what,message",
    [
        ("gradients", "ConfigError: decode_attention has no backward pass"),
        ("heads", "ShapeError: 3 query heads cannot share 2"),
        ("mask", "MaskError: mask: of its 9 frames of 3 tokens this rank holds frames"),
        ("mask type", "MaskError: mask: expected a FrameMask or None, got Tensor"),
    ],
)
def test_invalid_arguments_are_named(what: str, message: str) -> None:
    for found in run_loopback(2, attempt, what):
        assert found.startswith(message), found


def test_inputs_may_require_gradients_without_grad_mode() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(Decoding()))
    with torch.no_grad():
        assert not decode_attention(q, k, v).requires_grad
