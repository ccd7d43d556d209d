"""Layer: gloo ranks. The pool of workers itself: results, failures on some ranks, hangs, groups of changing size."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import MAX_WORKERS, RankDeath, RankError, RankHang, ranks


def add_up(rank: int, world: int, x: torch.Tensor, *, times: int = 1) -> dict[str, object]:
    x = x + times * rank
    dist.all_reduce(x)
    return {"sum": x, "who": (rank, world), "threads": torch.get_num_threads()}


def process_id(rank: int, world: int) -> int:
    dist.barrier()
    return os.getpid()


def random_number(rank: int, world: int) -> float:
    return torch.rand(()).item()


def with_gradient(rank: int, world: int) -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) * 2]


def fail_on(rank: int, world: int, *failing: int) -> int:
    if rank in failing:
        raise LookupError(f"nothing at {rank}")
    return rank


def fail_before_a_collective(rank: int, world: int) -> None:
    if rank == 1:
        raise LookupError("rank 1 never arrives")
    dist.barrier()


def sleep_on(rank: int, world: int, sleeper: int) -> None:
    if rank == sleeper:
        time.sleep(600)


def die_on(rank: int, world: int, victim: int) -> None:
    if rank == victim:
        os._exit(7)


class Unpicklable(RuntimeError):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_unpicklable(rank: int, world: int) -> None:
    raise Unpicklable(1, 2)


@pytest.mark.parametrize("world", [1, 2, 4, 3])
def test_results_come_back_by_rank(world: int) -> None:
    results = ranks(world).run(add_up, torch.ones(2), times=2)
    expected = torch.full((2,), float(world + world * (world - 1)))
    assert [result["who"] for result in results] == [(rank, world) for rank in range(world)]
    assert all(torch.equal(result["sum"], expected) for result in results)
    assert all(result["threads"] == 1 for result in results)


def test_workers_are_reused_when_the_size_changes() -> None:
    three = ranks(3).run(process_id)
    assert len(set(three)) == 3 and os.getpid() not in three
    assert ranks(2).run(process_id) == three[:2]
    assert ranks(3).run(process_id) == three


def test_every_case_starts_from_the_same_seed() -> None:
    first = ranks(2).run(random_number)
    assert first[0] == first[1]
    assert ranks(2).run(random_number) == first


def test_results_are_detached() -> None:
    (values,) = ranks(1).run(with_gradient)
    assert values[0].tolist() == [2.0, 2.0] and not values[0].requires_grad


def test_all_failing_ranks_are_shown_and_the_pool_goes_on() -> None:
    before = ranks(3).run(process_id)
    with pytest.raises(RankError, match=r"fail_on failed on rank 0, 2 of 3") as caught:
        ranks(3).run(fail_on, 0, 2)
    assert "nothing at 0" in str(caught.value) and "nothing at 2" in str(caught.value)
    assert "in fail_on" in str(caught.value), "the rank's own traceback is missing"
    assert sorted(caught.value.errors) == [0, 2]
    assert all(isinstance(error, LookupError) for error in caught.value.errors.values())
    assert ranks(3).run(process_id) == before


def test_errors_gives_the_exception_of_each_rank() -> None:
    errors = ranks(2).errors(fail_on, 1)
    assert errors[0] is None
    assert isinstance(errors[1], LookupError) and "nothing at 1" in str(errors[1])


def test_an_exception_that_cannot_be_pickled_still_arrives() -> None:
    with pytest.raises(RankError, match="Unpicklable: 1 and 2"):
        ranks(1).run(raise_unpicklable)


def test_a_rank_left_alone_in_a_collective_does_not_hide_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.GRACE", 0.5)
    with pytest.raises(RankError, match="rank 1 never arrives") as caught:
        ranks(2).run(fail_before_a_collective, timeout=30)
    assert isinstance(caught.value.errors[1], LookupError)
    assert isinstance(caught.value.errors[0], RankHang)
    assert ranks(2).run(add_up, torch.ones(1))[0]["sum"] == 3


def test_a_hang_ends_with_the_rank_and_its_stack() -> None:
    ranks(2).run(process_id)  # started beforehand, so that the time limit is the case's own
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 hung: no result after 1 s") as caught:
        ranks(2).run(sleep_on, 1, timeout=1)
    assert time.monotonic() - start < 100
    assert sorted(caught.value.errors) == [1]
    assert "sleep_on" in str(caught.value), "the stack of the hung rank is missing"
    assert ranks(2).run(add_up, torch.ones(1))[1]["sum"] == 3


def test_a_dead_worker_is_named_and_replaced() -> None:
    errors = ranks(2).errors(die_on, 0)
    assert isinstance(errors[0], RankDeath) and "exit code 7" in str(errors[0])
    assert ranks(2).run(add_up, torch.ones(1))[0]["sum"] == 3


@pytest.mark.parametrize("world", [0, MAX_WORKERS + 1])
def test_sizes_beyond_the_pool_are_refused(world: int) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        ranks(world)
