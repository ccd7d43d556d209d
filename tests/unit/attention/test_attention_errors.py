"""Layer: one process, then gloo ranks. Bad use of the functional layer ends in a typed error, on every rank, soon."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar.attention import decode_attention, lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, SeqParError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.sharding import frame_bounds
from ranks import ranks

Call = Callable[[Communicator], Any]


def qkv(rows: int = 4, keys: int = 6, heads: int = 4, groups: int = 2, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    k = torch.randn(batch, groups, keys, 8)
    return torch.randn(batch, heads, rows, 8), k, k.clone()


def everything(rows: int, frames: int) -> FrameMask:
    return FrameMask.from_dense(torch.ones(2, rows, frames, dtype=torch.bool), 3)


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
def test_what_is_wrong_everywhere_is_named_on_every_rank(name: str, raised: list[dict[str, str]]) -> None:
    _, kind, message = WRONG_EVERYWHERE[name]
    for found in raised:
        assert found[name].startswith(f"{kind.__name__}: ") and re.search(message, found[name]), found[name]


def odd_one_out(comm: Communicator, what: str) -> Any:
    """All ranks but the last agree."""
    odd = comm.rank == comm.size - 1
    x = qkv(keys=3 if "mask" in what else 6)
    mask = everything(4, comm.size)
    options: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.5 if odd else None},
        "accumulate_dtype": {"accumulate_dtype": None if odd else torch.float32},
        "mask missing": {"mask": None if odd else mask},
        "mask form": {"mask": FrameMask.from_intervals(*torch.zeros(2, 2, 4).long(), 3, comm.size) if odd else mask},
        "mask frames": {"mask": everything(4, comm.size * 3) if odd else mask},
        "kernel": {"kernel": "none" if odd else "auto"},
    }
    match what:
        case "rows" if odd:
            x = qkv(rows=5)
        case "heads" if odd:
            x = qkv(heads=8)
        case "batch" if odd:
            x = qkv(batch=3)
        case "dtype" if odd:
            x = tuple(t.bfloat16() for t in x)
        case "bad shape" if odd:
            x = (x[0], x[1], x[2][:, :, :2])
        case "strategy" if odd:
            return ring_attention(*x, group=comm)
        case "tile":
            return mesh_attention(*x, group=comm, tile=(3, 1) if odd else (1, 3))
        case "tile of other ranks" if odd:
            return mesh_attention(*x, group=comm, tile=(2, 2))
        case "heads that cannot be dealt" if odd:
            return ulysses_attention(*x, group=comm)
        case "layout":
            return ring_attention(*qkv(4, 4), group=comm, causal=True, layout="striped" if odd else "zigzag")
        case "causal" if odd:
            return ring_attention(*qkv(6, 6), group=comm, causal=True)
        case "causal":
            return ring_attention(*qkv(6, 6), group=comm)
    return lv_xattn(*x, group=comm, **options.get(what, {}))


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


def caught(comm: Communicator, what: str) -> Exception:
    try:
        odd_one_out(comm, what)
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return error
    return AssertionError("nothing was raised")


@pytest.mark.parametrize("what", list(DISAGREEMENTS))
def test_ranks_that_disagree_all_say_so(what: str) -> None:
    for error in run_loopback(3, caught, what):
        assert isinstance(error, AgreementError) and DISAGREEMENTS[what] in str(error), error


@pytest.mark.parametrize("what", list(ONE_RANK_WRONG))
def test_one_ranks_error_reaches_the_others(what: str) -> None:
    *others, odd = run_loopback(3, caught, what)
    assert isinstance(odd, ONE_RANK_WRONG[what]), odd
    for error in others:
        assert isinstance(error, AgreementError) and "rank 2 of the group refused its arguments" in str(error)


def test_different_numbers_of_keys_are_no_disagreement() -> None:
    def run(comm: Communicator) -> Tensor:
        return lv_xattn(*qkv(keys=comm.rank), group=comm)

    assert all(o.shape == (2, 4, 4, 8) for o in run_loopback(3, run))


def test_a_mask_kept_on_some_ranks_only_is_gathered_by_all() -> None:
    """A caller may build its mask anew on one rank and reuse it on another."""

    def run(comm: Communicator) -> list[Tensor]:
        torch.manual_seed(0)
        x = qkv(keys=3)
        kept = everything(4, comm.size)
        first = lv_xattn(*x, group=comm, mask=kept)
        return [first, lv_xattn(*x, group=comm, mask=kept if comm.rank else everything(4, comm.size))]

    for first, second in run_loopback(3, run, timeout=10):
        assert torch.equal(first, second)


def test_one_mask_used_with_others_in_turn() -> None:
    """What one rank sees may stay the same while another's rows change, and change back."""
    same, first, nothing = (FrameMask.from_dense(torch.full((2, 4, 2), seen), 3) for seen in (True, True, False))
    x = qkv(keys=3)

    def run(comm: Communicator) -> list[Tensor]:
        return [lv_xattn(*x, group=comm, mask=mask if comm.rank else same) for mask in (first, nothing, first)]

    mine, other = run_loopback(2, run, timeout=10)
    assert torch.equal(mine[0], mine[2]) and torch.equal(mine[0], mine[1])
    assert torch.equal(other[0], other[2]) and other[0].any() and not other[1].any()


def test_what_a_mask_keeps_for_one_group_is_not_taken_for_anothers() -> None:
    """Communicators come and go, at the same addresses; a stale hit would use other rows, or skip a gather and hang."""
    first, second = everything(4, 2), everything(4, 2)
    nothing = FrameMask.from_dense(torch.zeros(2, 4, 2, dtype=torch.bool), 3)
    x = qkv(keys=3)

    def run(comm: Communicator, of_second: FrameMask) -> tuple[bool, Tensor]:
        mask = first if comm.rank == 0 else of_second
        known = mask.known_as(comm, frame_bounds(2, 2)) > 0
        return known, lv_xattn(*x, group=comm, mask=mask)

    for i in range(20):
        (known, _), (_, o) = run_loopback(2, run, second if i % 2 else nothing)
        assert not known and bool(o.any()) == bool(i % 2)


def over_gloo(rank: int, world: int, whats: list[str]) -> list[Exception]:
    return [caught(as_communicator(None), what) for what in whats]


def test_disagreement_over_gloo_is_found_before_the_time_limit_and_the_group_can_go_on() -> None:
    whats = [*DISAGREEMENTS, *ONE_RANK_WRONG]
    ranks(3).run(over_gloo, whats[:1])  # the workers' start is not the test's time
    start = time.monotonic()
    for results in ranks(3).run(over_gloo, whats):
        assert all(isinstance(error, SeqParError) for error in results), results
    assert time.monotonic() - start < 240  # nothing waits for the time limit of the process group, 300 s


def one_rank_has_nothing_to_train(rank: int, world: int) -> list[Tensor]:
    """Keys that train on rank 0; rank 1 has no keys, and a query that does not train; by rows, and dealt by heads."""
    found = []
    for attention in (lv_xattn, ulysses_attention):
        torch.manual_seed(0)
        q = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(rank))
        k = torch.randn(1, 2, 4 if rank == 0 else 0, 8, requires_grad=rank == 0)
        attention(q, k, k * 1.0).sum().backward()
        found.append(torch.zeros(()) if k.grad is None else k.grad)
    return found


def test_a_rank_without_anything_to_train_takes_part_in_backward() -> None:
    grads, _ = ranks(2).run(one_rank_has_nothing_to_train, timeout=60)
    torch.manual_seed(0)
    k = torch.randn(1, 2, 4, 8).double().requires_grad_()
    q = torch.cat([torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)], 2).double()
    torch.nn.functional.scaled_dot_product_attention(q, k, k).sum().backward()
    for grad in grads:
        assert k.grad is not None and torch.allclose(grad.double(), k.grad, rtol=1e-4, atol=1e-5)


def one_rank_without_gradients(rank: int, world: int) -> None:
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    with torch.set_grad_enabled(rank == 0):
        lv_xattn(q, q, q)


def test_a_rank_without_gradients_is_named() -> None:
    for error in ranks(2).errors(one_rank_without_gradients, timeout=60):
        assert "rank 1 of the group runs without gradients (torch.no_grad)" in str(error)
