"""Layer: one process. Invalid arguments of the functional layer end in a typed error on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_error_cases import caught, everything, qkv
from mllm_seqpar.attention import decode_attention, lv_xattn, ring_attention
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, SeqParError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.sharding import frame_spans

Call = Callable[[Communicator], Any]


def lv(*x: Tensor, **options: Any) -> Call:
    return lambda comm: lv_xattn(*x, group=comm, **options)


def ring(*x: Tensor, **options: Any) -> Call:
    return lambda comm: ring_attention(*x, group=comm, **options)


Q, K, V = qkv()
SQUARE = qkv(4, 4)
WRONG_EVERYWHERE: dict[type[SeqParError], dict[str, Call]] = {
    ShapeError: {
        r"expected q.*; got q \(4, 4, 8\)": lv(Q[0], K[0], V[0]),
        r"expected q.* k \(2, 6, 8\) .*, v \(2, 6, 8\)": lv(Q, K[0], V[0]),
        r"expected q.*; got q \(4, 4, 8\) .*, k \(2, 4, 8\)": ring(*(x[0] for x in SQUARE), causal=True),
        "k, v of one shape": lv(Q, K, V[:, :, :5]),
        "q's head dim": lv(Q[..., :4], K, V),
        "a batch of 1": lv(qkv(batch=3)[0], K, V),
        "3 query heads cannot share 2": lv(*qkv(heads=3)),
        "share one dtype": ring(Q.bfloat16(), K, V),
        "must be floating point": lv(Q.int(), K.int(), V.int()),
        "cannot be sharded over 2 ranks in the zigzag layout": ring(*qkv(3, 3), causal=True),
        "as many keys as queries": ring(*qkv(4, 6), causal=True),
    },
    ConfigError: {
        "'fast' does not exist; choose auto": lv(Q, K, V, kernel="fast"),
        "scale: nan is invalid; pass a finite number": lv(Q, K, V, scale=float("nan")),
        r"scale: tensor\(1.\) is invalid; pass a finite number, or None": lv(Q, K, V, scale=torch.ones(())),
        "scale: True is invalid": lv(Q, K, V, scale=True),
        "causal: None is invalid; pass True or False": ring(*SQUARE, causal=None),
        "overlap: None is invalid": lv(Q, K, V, overlap=None),
        "return_lse: 1 is invalid": lv(Q, K, V, return_lse=1),
        "accumulate_dtype: torch.int64 is invalid": lv(Q, K, V, accumulate_dtype=torch.int64),
        "'wide' is invalid; pass \"auto\", torch.float32": lv(Q, K, V, accumulate_dtype="wide"),
        "'spiral' is invalid; pass one of zigzag": ring(*SQUARE, causal=True, layout="spiral"),
        "'helix' is invalid; pass one of zigzag": ring(*SQUARE, layout="helix"),
        "layout: None is invalid; pass one of zigzag": ring(*SQUARE, causal=True, layout=None),
    },
    MaskError: {
        "units_per_frame: 0 does not": lambda comm: decode_attention(Q, K, V, group=comm, units_per_frame=0),
        "exclude each other": ring(*SQUARE, causal=True, mask=everything(4, 2)),
        "expected a FrameMask or None, got Tensor": lv(*qkv(4, 3), mask=torch.ones(2, 4, 3, dtype=torch.bool)),
        r"\(batch, rows\) \(2, 5\)": lv(*qkv(4, 3), mask=everything(5, 2)),
        "of its 6 frames of 3": lv(Q, K, V, mask=everything(4, 6)),
    },
}


def test_invalid_arguments_are_named_on_every_rank() -> None:
    calls = [(kind, message, call) for kind, cases in WRONG_EVERYWHERE.items() for message, call in cases.items()]
    for errors in run_loopback(2, lambda comm: [attempt(lambda call=call: call(comm))[1] for *_, call in calls]):
        for (kind, message, _), error in zip(calls, errors, strict=True):
            assert type(error) is kind and re.search(message, str(error)), (message, error)


DISAGREEMENTS = {
    "rows": "q rows: ranks 0, 1: 4; rank 2: 5",
    "heads": "q heads: ranks 0, 1: 4",
    "batch": "q batch: ranks 0, 1: 2",
    "shared keys": "k batch: ranks 0, 1: 2; rank 2: 1",
    "dtype": "dtype: ranks 0, 1: torch.float32; rank 2: torch.bfloat16",
    "strategy": "strategy",
    "tile": "tile: ranks 0, 1: (1, 3); rank 2: (3, 1)",
    "layout": "layout",
    "causal": "layout",
    "scale": "scale: ranks 0, 1: 0.35355339",
    "accumulate_dtype": "rank 2: None",
    "mask missing": "mask: ",
    "mask sizes": "mask tokens per frame: ranks 0, 1: 3; rank 2: 9 in all, checksum",
    "decoding": "different calls at the same time: ranks 0, 1: attention; rank 2: decode_attention",
    "decoding rows": "decode_attention: the ranks differ in q rows: ranks 0, 1: 4; rank 2: 5",
}
ONE_RANK_WRONG = {
    "kernel": ConfigError,
    "bad shape": ShapeError,
    "mask frames": MaskError,
    "tile of other ranks": ConfigError,
    "heads that cannot be sharded": ConfigError,
    "decoding gradients": ConfigError,
}


@pytest.mark.parametrize("what", [*DISAGREEMENTS, *ONE_RANK_WRONG])
def test_disagreement_or_error_of_one_rank_is_raised_on_every_rank(what: str) -> None:
    *others, odd = run_loopback(3, caught, what)
    message = DISAGREEMENTS.get(what, "attention: rank 2: ")  # also of "decode_attention: "
    for error in others:
        assert isinstance(error, AgreementError) and message in str(error), error
    assert isinstance(odd, ONE_RANK_WRONG.get(what, AgreementError)), odd
    assert what in ONE_RANK_WRONG or message in str(odd)


def test_number_of_keys_may_differ() -> None:
    results = run_loopback(3, lambda comm: lv_xattn(*qkv(keys=comm.rank), group=comm))
    assert all(o.shape == (2, 4, 4, 8) for o in results)


def test_mask_cached_on_some_ranks_is_gathered_by_all() -> None:
    """A caller may rebuild its mask on one rank and reuse it on another."""
    x = qkv(keys=3)

    def run(comm: Communicator) -> list[Tensor]:
        kept = everything(4, comm.size)
        masks = (kept, kept if comm.rank else everything(4, comm.size))
        return [lv_xattn(*x, group=comm, mask=mask) for mask in masks]

    for first, second in run_loopback(3, run, timeout=10):
        assert torch.equal(first, second)


def test_mask_is_reused_with_different_masks_on_other_ranks() -> None:
    same, first, nothing = (FrameMask.from_dense(torch.full((2, 4, 2), seen), 3) for seen in (True, True, False))
    x = qkv(keys=3)

    def run(comm: Communicator) -> list[Tensor]:
        return [lv_xattn(*x, group=comm, mask=mask if comm.rank else same) for mask in (first, nothing, first)]

    mine, other = run_loopback(2, run, timeout=10)
    assert torch.equal(mine[0], mine[2]) and torch.equal(mine[0], mine[1])
    assert torch.equal(other[0], other[2]) and other[0].any() and not other[1].any()


def test_mask_cache_of_one_group_is_not_used_for_another() -> None:
    """New communicators may reuse addresses; a stale hit would use other rows, or skip a gather and hang."""
    first, second = everything(4, 2), everything(4, 2)
    nothing = FrameMask.from_dense(torch.zeros(2, 4, 2, dtype=torch.bool), 3)
    x = qkv(keys=3)

    def run(comm: Communicator, of_second: FrameMask) -> tuple[bool, Tensor]:
        mask = first if comm.rank == 0 else of_second
        known = mask.gathered_digest(comm, frame_spans(2, 2)) > 0
        return known, lv_xattn(*x, group=comm, mask=mask)

    for i in range(8):
        (known, _), (_, o) = run_loopback(2, run, second if i % 2 else nothing)
        assert not known and bool(o.any()) == bool(i % 2)
