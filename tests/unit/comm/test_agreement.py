"""Layer: one process. Ranks that differ, or of which one failed, all raise before the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mllm_seqpar.cli.program_exit import describe
from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.errors import AgreementError, ConfigError, DataError


def outcomes(n: int, check: Callable[[Communicator], Any]) -> list[Any]:
    """Return what `check` returned or raised on each rank."""
    found = run_loopback(n, lambda comm: attempt(lambda: check(comm)))
    return [result if error is None else error for result, error in found]


def raised(check: Callable[[Communicator], Any], n: int = 3) -> list[tuple[type, str]]:
    return [(type(error), str(error)) for error in outcomes(n, check)]


def failing(error: Exception) -> Callable[[], Any]:
    def step() -> Any:
        raise error

    return step


def test_equal_facts_pass() -> None:
    def run(comm: Communicator) -> list[Any]:
        return [
            agree(comm, "arguments", lambda: {"sp": 1, "tile": None}, dict),
            agree(comm, "data", lambda: comm.rank),
            agree(comm, "keys", lambda: comm.rank, lambda _: {"a": 3}, numbers=lambda rank: [rank, 7]),
        ]

    rows = [[0, 7], [1, 7], [2, 7]]
    assert outcomes(3, run) == [[{"sp": 1, "tile": None}, rank, (rank, rows)] for rank in range(3)]


def test_different_facts_are_quoted_by_rank() -> None:
    strategies = ["ring", "lv-xattn", "ring"]
    found = raised(lambda comm: agree(comm, "arguments", lambda: {"s": strategies[comm.rank], "sp": 2}, dict))
    message = "arguments: the ranks differ in s: ranks 0, 2: ring; rank 1: lv-xattn. "
    assert found == [(AgreementError, message + "Pass the same on every rank")] * 3
    found = raised(lambda comm: agree(comm, "data", lambda: comm.rank, lambda rank: {"rank": rank}, remedy="Stop"), 2)
    assert found == [(AgreementError, "data: the ranks differ in rank: rank 0: 0; rank 1: 1. Stop")] * 2


def test_equal_facts_take_one_exchange() -> None:
    def run(comm: Communicator) -> int:
        agree(comm, "arguments", lambda: {"text": "x" * 1000}, dict)
        return comm.bytes.messages["agreement"]

    assert outcomes(3, run) == [2] * 3


def test_ranks_in_different_calls_are_told_which() -> None:
    calls: list[Callable[[Communicator], Any]] = [
        lambda comm: agree(comm, "forward pass", lambda: {"a": 3}, dict, numbers=lambda _: [1]),
        lambda comm: agree(comm, "generate", lambda: {"text": "x"}, dict),
        lambda comm: agree(comm, "data", lambda: 1),
    ]
    found = raised(lambda comm: calls[comm.rank](comm))
    message = "the ranks of the group are in different calls at the same time: "
    assert found == [(AgreementError, found[0][1])] * 3
    assert found[0][1].startswith(message + "rank 0: forward pass; rank 1: generate; rank 2: data. Every rank")


def test_failure_of_one_rank_is_quoted_on_the_others() -> None:
    step, fine = failing(DataError("no such file: x.jsonl")), lambda: 1
    found = raised(lambda comm: agree(comm, "arguments", step if comm.rank == 1 else fine))
    other = (AgreementError, "arguments: rank 1: no such file: x.jsonl")
    assert found == [other, (DataError, "no such file: x.jsonl"), other]


def printed(errors: list[Exception | None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process of each rank prints when `agree` ends it."""
    lines = []
    for rank, error in enumerate(outcomes(3, lambda comm: agree(comm, "data", error=errors[comm.rank]))):
        monkeypatch.setenv("RANK", str(rank))
        lines.append("no error" if error is None else describe(error)[0])
    return lines


def test_each_cause_is_printed_once_and_other_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, gone = (DataError, "lost"), (DataError, "gone")
    for errors, lines in [
        ([None, None, None], ["no error"] * 3),
        ([lost, lost, lost], ["error: lost", "", ""]),
        ([None, lost, gone], ["error: data: rank 1: lost; rank 2: gone", "", ""]),
        ([lost, None, gone], ["error: lost", "", "error: gone"]),
    ]:
        assert printed([pair and pair[0](pair[1]) for pair in errors], monkeypatch) == lines
    lines = printed([None, KeyError("x"), None], monkeypatch)
    assert lines[0] == "error: data: rank 1: KeyError: 'x'"
    assert lines[1].startswith("Traceback") and lines[1].endswith("KeyError: 'x'")


def test_one_process_raises_its_own_error() -> None:
    agree(as_communicator(), "arguments", lambda: {"sp": 1}, dict)
    with pytest.raises(ConfigError, match="bad"):
        agree(as_communicator(), "arguments", error=ConfigError("bad"))
