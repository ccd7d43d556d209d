"""Layer: gloo ranks. The worker pool of the tests: results, failures, hangs, and groups of changing size."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RankDeath, RankError, RankHang, ranks
from ranks_worker import RemoteError


def all_reduced(rank: int, world: int, x: torch.Tensor, *, times: int = 1) -> dict[str, object]:
    total = (x + times * rank).requires_grad_() * 1
    dist.all_reduce(total.detach())
    draw = torch.rand(()).item()
    return {"sum": total, "who": (rank, world), "draw": draw, "set": os.environ.get("OF_CASE"), "process": os.getpid()}


def fail_on(rank: int, world: int, *failing: int) -> int:
    if rank in failing:
        raise LookupError(f"nothing at {rank}")
    return rank


class Unpicklable(RuntimeError):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def go_wrong(rank: int, world: int, victim: int, how: str) -> None:
    if rank != victim:
        if how == "collective":
            dist.barrier()
        return
    if how == "exit":
        os._exit(7)
    if how == "sleep":
        time.sleep(600)
    raise Unpicklable(1, 2)


def test_results_come_back_by_rank_from_reused_workers() -> None:
    processes: list[int] = []
    for world in (3, 1, 2, 3):
        results = ranks(world, {"OF_CASE": str(world)}).run(all_reduced, torch.ones(2), times=2)
        assert [result["who"] for result in results] == [(rank, world) for rank in range(world)]
        expected = torch.full((2,), float(world + world * (world - 1)))
        assert all(torch.equal(r["sum"], expected) and not r["sum"].requires_grad for r in results)
        processes = processes or [result["process"] for result in results]
        assert [result["process"] for result in results] == processes[:world]
        # every rank has the same seed and the variables of the case
        assert {(result["set"], result["draw"]) for result in results} == {(str(world), results[0]["draw"])}
    assert len({*processes, os.getpid()}) == 4
    assert ranks(1).run(all_reduced, torch.ones(1))[0]["set"] is None


def test_all_failing_ranks_are_shown_and_the_pool_continues() -> None:
    with pytest.raises(RankError, match=r"fail_on failed on rank 0, 2 of 3") as caught:
        ranks(3).run(fail_on, 0, 2)
    assert "nothing at 0" in str(caught.value) and "nothing at 2" in str(caught.value)
    assert "in fail_on" in str(caught.value), "the rank's own traceback is missing"
    assert sorted(caught.value.errors) == [0, 2]
    errors = ranks(2).errors(fail_on, 1)
    assert errors[0] is None and isinstance(errors[1], LookupError)
    with pytest.raises(RankError, match="Unpicklable: 1 and 2"):
        ranks(1).run(go_wrong, 0, "raise")
    assert ranks(2).run(fail_on) == [0, 1]


@pytest.mark.slow
def test_a_rank_that_waits_for_a_failed_one_does_not_hide_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.GRACE", 0.5)
    with pytest.raises(RankError, match="Unpicklable: 1 and 2") as caught:
        ranks(2).run(go_wrong, 1, "collective", timeout=30)
    assert [type(caught.value.errors[rank]) for rank in (0, 1)] == [RankHang, RemoteError]


@pytest.mark.slow
def test_hung_and_dead_workers_are_named_and_replaced() -> None:
    ranks(2).run(fail_on)  # starts the workers, so that the time limit applies to the case alone
    with pytest.raises(RankError, match="rank 1 hung: no result after 1 s") as caught:
        ranks(2).run(go_wrong, 1, "sleep", timeout=1)
    assert sorted(caught.value.errors) == [1]
    assert "go_wrong" in str(caught.value), "the stack of the hung rank is missing"
    errors = ranks(2).errors(go_wrong, 0, "exit")
    assert isinstance(errors[0], RankDeath) and "exit code 7" in str(errors[0])
    assert ranks(2).run(fail_on) == [0, 1]


def test_sizes_beyond_the_pool_are_refused() -> None:
    for world in (0, 9):
        with pytest.raises(ValueError, match="1 to 8"):
            ranks(world)
