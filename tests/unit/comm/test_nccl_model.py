"""Layer: one process. The model of NCCL finds wrong orders, missing operations and memory that is used too early."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator, Recv, Send, Subgroup
from nccl_model import DataRace, Deadlock, Mismatch, NcclCommunicator, run_nccl_model
from transport_cases import collectives

TIMINGS = ("late", "early", "random")


def hop(comm: Communicator, x: Tensor, buffer: Tensor) -> Any:
    """Post a hop of a ring: x to the next rank, `buffer` from the previous one."""
    return comm.exchange([Send((comm.rank + 1) % comm.size, x, "x")], [Recv((comm.rank - 1) % comm.size, buffer)])


def violation(fn: Any, n: int = 2, **options: Any) -> str:
    """Return the message of the violation that every seed and the late timing find."""
    kind = options.pop("kind", Deadlock)
    for timing, seed in (("late", 0), ("late", 1), *options.pop("more", ())):
        with pytest.raises(kind) as found:
            run_nccl_model(n, fn, timing=timing, seed=seed, **options)
    return str(found.value)


EVERY = (("early", 0), ("random", 0), ("random", 1))


def test_data_arrives_between_post_and_wait() -> None:
    def run(comm: Communicator) -> tuple[list[float], list[int], list[float]]:
        x, buffer, numbers = torch.ones(2) + comm.rank, torch.zeros(2), torch.zeros(2, dtype=torch.int64)
        first = hop(comm, x, buffer)
        before = buffer.tolist()
        second = hop(comm, torch.arange(2), numbers)
        between = numbers.tolist()
        first.wait()
        second.wait()
        x.zero_()  # may change after the wait
        return before, between, buffer.tolist()

    for before, between, after in run_nccl_model(2, run):
        assert all(x != x for x in before) and between != [0, 1] != [0, 0] and after in ([1, 1], [2, 2])
    assert [before for before, _, _ in run_nccl_model(2, run, timing="early")] == [[2, 2], [1, 1]]


def test_memory_that_is_used_before_wait_is_found() -> None:
    def changed(comm: Communicator, which: int) -> None:
        tensors = torch.ones(4), torch.zeros(4)
        pending = hop(comm, *tensors)
        tensors[which][1] = 5
        pending.wait()

    def restored(comm: Communicator) -> None:
        x = torch.ones(4)
        pending = hop(comm, x, torch.zeros(4))
        x.mul_(2)
        x.div_(2)
        pending.wait()

    def shared(comm: Communicator, first: int, second: int) -> None:
        tensors = [[torch.ones(4), torch.zeros(4)] for _ in range(2)]
        tensors[1][second] = tensors[0][first]
        pending = [hop(comm, *pair) for pair in tensors]
        for each in pending:
            each.wait()

    assert "tensor sent as x (4,) float32 changed" in violation(lambda c: changed(c, 0), kind=DataRace, more=EVERY)
    assert "receive buffer for (4,) float32 changed" in violation(lambda c: changed(c, 1), kind=DataRace, more=EVERY)
    with pytest.raises(DataRace, match="tensor sent as x"):
        run_nccl_model(2, restored, timing="random")
    for pair in ((0, 1), (1, 0), (1, 1)):
        assert "shares memory" in violation(lambda c, p=pair: shared(c, *p), kind=DataRace, more=EVERY)
    run_nccl_model(2, lambda c: shared(c, 0, 0))  # two sends may read the same memory


def test_orders_that_differ_between_ranks_are_reported() -> None:
    def collective_first(comm: NcclCommunicator) -> None:
        """Rank 1 posts the all-gather before the hop, the others after it, on one communicator."""
        steps = [lambda: hop(comm, torch.ones(2), torch.zeros(2)), lambda: comm.start_all_gather(torch.ones(3), "w")]
        pending = [step() for step in (steps[::-1] if comm.rank == 1 else steps)]
        for each in pending:
            each.wait()

    def blocking(comm: NcclCommunicator) -> None:
        """Every rank receives before it sends: no exchange has both."""
        previous, following = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        comm.exchange([], [Recv(previous, torch.empty(2))]).wait()
        comm.exchange([Send(following, torch.ones(2), "x")], []).wait()

    message = violation(collective_first, n=3, more=EVERY)
    assert "no rank can go on" in message
    assert "rank 0 waits for exchange 0 of communicator 'attention' (sends x (2,) float32 to rank 1" in message
    assert "rank 1 waits for all_gather 0 of communicator 'attention' (w (3,) float32)" in message
    message = violation(blocking, n=3, more=EVERY)
    assert "rank 2 waits for exchange 0 of communicator 'attention' (receives (2,) float32 from rank 1)" in message


def two_communicators(comm: NcclCommunicator) -> float:
    """Post a hop and an all-gather on another communicator, rank 1 in the other order; return the sum of both."""
    other, buffer = comm.another("fsdp"), torch.zeros(2)
    if comm.rank == 1:
        gathered = other.start_all_gather(torch.ones(3), "w")
        pending = hop(comm, torch.ones(2), buffer)
    else:
        pending = hop(comm, torch.ones(2), buffer)
        gathered = other.start_all_gather(torch.ones(3), "w")
    pending.wait()
    return float(buffer.sum() + torch.stack(gathered.wait()).sum())


def test_two_communicators_need_one_order_only_if_they_share_a_resource() -> None:
    for timing in TIMINGS:
        assert run_nccl_model(3, two_communicators, timing=timing) == [2 + 9] * 3
    message = violation(two_communicators, n=3, more=EVERY, one_resource=True)
    assert "rank 1 waits for exchange 0 of communicator 'attention'" in message
    assert "its queue is at all_gather 0 of communicator 'fsdp' (w (3,) float32)" in message


def test_ends_that_disagree_are_reported() -> None:
    def shapes(comm: Communicator) -> None:
        hop(comm, torch.ones(2 + comm.rank), torch.zeros(2 + comm.rank)).wait()

    def dtypes(comm: Communicator) -> None:
        hop(comm, torch.ones(2), torch.zeros(2, dtype=torch.int32)).wait()

    def peers(comm: Communicator) -> None:
        """Rank 1 sends to rank 0, which waits for rank 2."""
        if comm.rank:
            comm.exchange([Send(0, torch.ones(1), "x")] if comm.rank == 1 else [], []).wait()
        else:
            comm.exchange([], [Recv(2, torch.empty(1))]).wait()

    def layers(comm: Communicator) -> None:
        comm.all_gather(torch.ones(2), f"layer {comm.rank}")

    assert re.search(
        r"rank 0 sends x \(2,\) .* receives \(3,\)|rank 1 sends x \(3,\) .* receives \(2,\)",
        violation(shapes, kind=Mismatch),
    )
    assert "sends x (2,) float32 where" in violation(dtypes, kind=Mismatch, more=EVERY)
    message = violation(peers, n=3, more=EVERY)
    assert "rank 0 waits for exchange 0 of communicator 'attention' (receives (1,) float32 from rank 2)" in message
    assert "rank 1 waits for" in message and "rank 2 returned" in message
    assert "rank 1: all_gather 0 of communicator 'attention' (layer 1" in violation(layers, kind=Mismatch, more=EVERY)


def test_operations_that_are_not_waited_for_or_not_matched_are_reported() -> None:
    def forgotten(comm: Communicator) -> None:
        pending = hop(comm, torch.ones(2), torch.zeros(2))
        if comm.rank == 0:
            pending.wait()

    def alone(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.exchange([Send(1, torch.ones(1), "x")], [])

    assert "rank 1 never waited for exchange 0" in violation(forgotten, more=EVERY)
    assert "rank 0 returned, but nothing completes its exchange 0" in violation(alone, more=EVERY)


def test_error_of_a_rank_stops_the_others() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 2:
            raise LookupError("rank 2 failed")
        comm.all_gather(torch.zeros(1))

    violation(run, n=4, kind=LookupError, more=EVERY)


class TwoRounds(NcclCommunicator):
    """Splits an exchange: messages to and from rank 0 first, then all others."""

    def rounds(self, sends: Any, recvs: Any) -> Any:
        def chosen(to: int, first: bool) -> bool:
            return (0 in (to, self.rank)) is first

        return [
            ([s for s in sends if chosen(s.peer, first)], [r for r in recvs if chosen(r.peer, first)])
            for first in (True, False)
        ]


class ApartRounds(NcclCommunicator):
    """Splits an exchange so that sends and receives that match are in different rounds."""

    def rounds(self, sends: Any, recvs: Any) -> Any:
        return [([], recvs), (sends, [])]


def test_exchange_may_be_split_if_ends_that_match_are_in_the_same_round() -> None:
    run_nccl_model(3, lambda comm: collectives(Subgroup(comm, range(3))), communicator=TwoRounds)
    violation(lambda comm: collectives(Subgroup(comm, range(3))), n=3, communicator=ApartRounds)
