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
from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, SeqParError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.sharding import frame_bounds

Call = Callable[[Communicator], Any]


WRONG_EVERYWHERE: dict[str, tuple[Call, type[SeqParError], str]] = {
    "three dims": (lambda g: lv_xattn(*(x[0] for x in qkv()), group=g), ShapeError, "expected q"),
    "three dims, causal": (
        lambda g: ring_attention(*(x[0] for x in qkv()), group=g, causal=True),
        ShapeError,
        "expected q",
    ),
    "k and v differ": (lambda g: lv_xattn(*qkv()[:2], qkv()[2][:, :, :5], group=g), ShapeError, "k, v of one shape"),
    "head dim": (lambda g: lv_xattn(qkv()[0][..., :4], *qkv()[1:], group=g), ShapeError, "q's head dim"),
    "key batch": (lambda g: lv_xattn(qkv(batch=3)[0], *qkv(batch=2)[1:], group=g), ShapeError, "a batch of 1"),
    "heads": (lambda g: lv_xattn(*qkv(heads=3), group=g), ShapeError, "3 query heads cannot share 2"),
    "dtypes": (lambda g: ring_attention(qkv()[0].bfloat16(), *qkv()[1:], group=g), ShapeError, "share one dtype"),
    "integers": (lambda g: lv_xattn(*(x.int() for x in qkv()), group=g), ShapeError, "must be floating point"),
    "kernel": (lambda g: lv_xattn(*qkv(), group=g, kernel="fast"), ConfigError, "'fast' does not exist; choose auto"),
    "scale": (
        lambda g: lv_xattn(*qkv(), group=g, scale=float("nan")),
        ConfigError,
        "scale: nan is not a finite number",
    ),
    "learned scale": (
        lambda g: lv_xattn(*qkv(), group=g, scale=torch.ones(())),  # type: ignore[arg-type]
        ConfigError,
        r"scale: tensor\(1.\) is not a finite number; pass a float",
    ),
    "causal": (
        lambda g: ring_attention(*qkv(4, 4), group=g, causal=None),  # type: ignore[arg-type]
        ConfigError,
        "causal: None is not a bool",
    ),
    "units": (lambda g: decode_attention(*qkv(), group=g, units_per_frame=0), MaskError, "units_per_frame: 0 does not"),
    "accumulate": (
        lambda g: lv_xattn(*qkv(), group=g, accumulate_dtype=torch.int64),
        ConfigError,
        "torch.int64 cannot be used",
    ),
    "layout": (
        lambda g: ring_attention(*qkv(4, 4), group=g, causal=True, layout="spiral"),
        ConfigError,
        "'spiral' is unknown; choose one of zigzag",
    ),
    "layout of attention that is not causal": (
        lambda g: ring_attention(*qkv(4, 4), group=g, layout="spiral"),
        ConfigError,
        "'spiral' is unknown; choose one of zigzag",
    ),
    "no layout": (
        lambda g: ring_attention(*qkv(4, 4), group=g, causal=True, layout=None),  # type: ignore[arg-type]
        ConfigError,
        "None is unknown; choose one of zigzag",
    ),
    "odd rows": (
        lambda g: ring_attention(*qkv(3, 3), group=g, causal=True),
        ShapeError,
        "cannot be sharded over 2 ranks in the zigzag layout",
    ),
    "causal keys": (lambda g: ring_attention(*qkv(4, 6), group=g, causal=True), ShapeError, "as many keys as queries"),
    "causal and mask": (
        lambda g: ring_attention(*qkv(4, 4), group=g, causal=True, mask=everything(4, 2)),
        MaskError,
        "exclude each other",
    ),
    "mask type": (
        lambda g: lv_xattn(*qkv(4, 3), group=g, mask=torch.ones(2, 4, 3, dtype=torch.bool)),
        MaskError,
        "expected a FrameMask or None, got Tensor",
    ),
    "mask rows": (
        lambda g: lv_xattn(*qkv(4, 3), group=g, mask=everything(5, 2)),
        MaskError,
        r"\(batch, rows\) \(2, 5\)",
    ),
    "mask frames": (lambda g: lv_xattn(*qkv(4, 6), group=g, mask=everything(4, 6)), MaskError, "of its 6 frames of 3"),
}


def calls(comm: Communicator) -> dict[str, str]:
    """What each of the calls raises."""
    found = {}
    for name, (call, _, _) in WRONG_EVERYWHERE.items():
        try:
            call(comm)
            found[name] = "nothing"
        except Exception as error:  # noqa: BLE001 - the test looks at what it is
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def raised() -> list[dict[str, str]]:
    return run_loopback(2, calls)


@pytest.mark.parametrize("name", list(WRONG_EVERYWHERE))
def test_invalid_arguments_are_named_on_every_rank(name: str, raised: list[dict[str, str]]) -> None:
    _, kind, message = WRONG_EVERYWHERE[name]
    for found in raised:
        assert found[name].startswith(f"{kind.__name__}: ") and re.search(message, found[name]), found[name]


DISAGREEMENTS = {
    "rows": "q rows: rank 0 has 4, rank 1 has 4, rank 2 has 5",
    "heads": "q heads: rank 0 has 4",
    "batch": "q batch: rank 0 has 2",
    "dtype": "dtype: rank 0 has torch.float32, rank 1 has torch.float32, rank 2 has torch.bfloat16",
    "strategy": "strategy",
    "tile": "tile rows: rank 0 has 1, rank 1 has 1, rank 2 has 3; tile columns",
    "layout": "layout",
    "causal": "layout",
    "scale": "scale: rank 0 has 0.353553, rank 1 has 0.353553, rank 2 has 0.5",
    "accumulate_dtype": "rank 2 has None",
    "mask missing": "mask form",
    "mask form": "mask form",
}
ONE_RANK_WRONG = {
    "kernel": ConfigError,
    "bad shape": ShapeError,
    "mask frames": MaskError,
    "tile of other ranks": ConfigError,
    "heads that cannot be dealt": ConfigError,
}


@pytest.mark.parametrize("what", list(DISAGREEMENTS))
def test_disagreement_is_raised_on_every_rank(what: str) -> None:
    for error in run_loopback(3, caught, what):
        assert isinstance(error, AgreementError) and DISAGREEMENTS[what] in str(error), error


@pytest.mark.parametrize("what", list(ONE_RANK_WRONG))
def test_error_of_one_rank_reaches_the_others(what: str) -> None:
    *others, odd = run_loopback(3, caught, what)
    assert isinstance(odd, ONE_RANK_WRONG[what]), odd
    for error in others:
        assert isinstance(error, AgreementError) and "rank 2 of the group refused its arguments" in str(error)


def test_number_of_keys_may_differ() -> None:
    def run(comm: Communicator) -> Tensor:
        return lv_xattn(*qkv(keys=comm.rank), group=comm)

    assert all(o.shape == (2, 4, 4, 8) for o in run_loopback(3, run))


def test_mask_cached_on_some_ranks_is_gathered_by_all() -> None:
    """A caller may rebuild its mask on one rank and reuse it on another."""

    def run(comm: Communicator) -> list[Tensor]:
        torch.manual_seed(0)
        x = qkv(keys=3)
        kept = everything(4, comm.size)
        first = lv_xattn(*x, group=comm, mask=kept)
        return [first, lv_xattn(*x, group=comm, mask=kept if comm.rank else everything(4, comm.size))]

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
        known = mask.gathered_digest(comm, frame_bounds(2, 2)) > 0
        return known, lv_xattn(*x, group=comm, mask=mask)

    for i in range(8):
        (known, _), (_, o) = run_loopback(2, run, second if i % 2 else nothing)
        assert not known and bool(o.any()) == bool(i % 2)
