"""Layer: pure Python. An exchange is divided into rounds in which the sends and receives of all ranks match."""

from __future__ import annotations

import random

import pytest
import torch

from mllm_seqpar.comm import Recv, Send
from mllm_seqpar.comm.nccl_settings import setting_problems
from mllm_seqpar.comm.process_group import message_rounds

Counts = dict[tuple[int, int], int]
"""Number of messages by sender and receiver."""


def launched(n: int, counts: Counts, limit: int | None) -> list[list[tuple[list[int], list[int]]]]:
    """Return the messages that each rank sends and receives in each of its rounds, by number."""
    numbers = {pair: range(1000 * i, 1000 * i + counts[pair]) for i, pair in enumerate(counts)}
    tensors = {number: torch.tensor(number) for some in numbers.values() for number in some}
    found = []
    for rank in range(n):
        sends = [Send(b, tensors[i], "x") for (a, b), some in numbers.items() if a == rank for i in some]
        recvs = [Recv(a, tensors[i]) for (a, b), some in numbers.items() if b == rank for i in some]
        rounds = message_rounds(rank, n, sends, recvs, limit)
        found.append([([int(s.tensor) for s in out], [int(r.buffer) for r in into]) for out, into in rounds])
    return found


def deliver(rounds: list[list[tuple[list[int], list[int]]]]) -> int:
    """Run the rounds as NCCL would at worst: a message is delivered if it is in the current round of both ranks.

    Returns:
        the number of delivered messages.
    """
    waiting, delivered = [list(one) for one in rounds], set[int]()
    while any(waiting):
        current = [one[0] for one in waiting if one]
        delivered |= {i for out, _ in current for i in out} & {i for _, into in current for i in into}
        done = [one for one in waiting if one and delivered.issuperset(one[0][0] + one[0][1])]
        assert done, "a deadlock: no rank can finish its round"
        for one in done:
            del one[0]
    return len(delivered)


@pytest.mark.parametrize("limit", [4, 9, 256])
@pytest.mark.parametrize("n", [2, 3, 8, 33])
def test_rounds_match_on_all_ranks_and_stay_below_the_limit(n: int, limit: int) -> None:
    generator = random.Random(n)
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    counts = {pair: generator.choice((0, 1, 4, 21)) for pair in pairs}
    rounds = launched(n, counts, limit)
    assert all(len(out) + len(into) <= limit for one in rounds for out, into in one)
    assert deliver(rounds) == sum(counts.values())


def test_messages_between_two_ranks_stay_in_order() -> None:
    first, second = launched(2, {(0, 1): 30}, 8)
    assert len(first) > 1
    assert [i for out, _ in first for i in out] == [i for _, into in second for i in into] == list(range(30))


def test_ring_steps_and_small_groups_are_one_round() -> None:
    for n in (2, 5, 64, 512):
        assert all(len(one) == 1 for one in launched(n, {(r, (r + 1) % n): 8 for r in range(n)}, 256)), n
    everyone: Counts = {(a, b): 4 for a in range(16) for b in range(16) if a != b}
    assert all(len(one) == 1 for one in launched(16, everyone, 256))
    assert all(len(one) == 1 for one in launched(2, {(0, 1): 2000, (1, 0): 2000}, None))


def test_settings_that_hinder_transfers_over_nccl_are_named() -> None:
    good = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert setting_problems(good) == []
    for name, value in (
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
    ):
        (problem,) = setting_problems(good | {name: value})
        assert problem.startswith(name)
    assert len(setting_problems({})) == 1
