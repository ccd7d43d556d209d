"""Layer: one process. Ranks that differ, or of which one failed, all raise before the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mllm_seqpar.cli.program_exit import describe
from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.comm.agreement import check_collectively, raise_on_all_ranks, require_agreement, require_same_text
from mllm_seqpar.errors import AgreementError, ConfigError, DataError


def outcomes(n: int, check: Callable[[Communicator], Any]) -> list[Any]:
    """Return what `check` returned or raised on each rank."""

    def run(comm: Communicator) -> Any:
        try:
            return check(comm)
        except Exception as error:
            return error

    return run_loopback(n, run)


def raised(check: Callable[[Communicator], Any], n: int = 3) -> list[tuple[type, str]]:
    return [(type(error), str(error)) for error in outcomes(n, check)]


def failing(error: Exception) -> Callable[[], Any]:
    def step() -> Any:
        raise error

    return step


def test_equal_facts_pass() -> None:
    def run(comm: Communicator) -> list[Any]:
        return [
            raise_on_all_ranks(comm, "arguments", None, {"sp": 1, "tile": None}),
            require_agreement(comm, "pass", ("a",), lambda: {"a": 3}),
            require_same_text(comm, "options", lambda: "x"),
            check_collectively(comm, "data", lambda: comm.rank),
        ]

    assert outcomes(3, run) == [[None, [[], [], []], None, rank] for rank in range(3)]


def test_different_facts_are_quoted_by_rank() -> None:
    strategies = ["ring", "lv-xattn", "ring"]
    found = raised(lambda comm: raise_on_all_ranks(comm, "arguments", None, {"s": strategies[comm.rank], "sp": 2}))
    message = "arguments: the ranks differ in s: ranks 0, 2: ring; rank 1: lv-xattn. "
    assert found == [(AgreementError, message + "Start all ranks with the same options and files")] * 3
    found = raised(lambda comm: check_collectively(comm, "data", lambda: comm.rank, lambda rank: {"rank": rank}), 2)
    assert {kind for kind, _ in found} == {AgreementError} and "rank: rank 0: 0; rank 1: 1" in found[0][1]


def test_different_integers_and_texts_are_quoted_by_rank() -> None:
    found = raised(lambda comm: require_agreement(comm, "pass", ("a", "b"), lambda: {"a": comm.rank // 2, "b": 7}))
    message = "pass: the ranks of the sequence-parallel group were given different inputs. "
    assert found == [(AgreementError, found[0][1])] * 3
    assert found[0][1].startswith(message + "a: rank 0 has 0, rank 1 has 0, rank 2 has 1. Every rank")
    found = raised(lambda comm: require_same_text(comm, "options", lambda: "xy"[comm.rank]), 2)
    message = "options: the ranks of the group disagree. rank 0: x; rank 1: y. Pass the same on every rank"
    assert found == [(AgreementError, message)] * 2


def test_ranks_in_different_calls_are_told_which() -> None:
    calls: list[Callable[[Communicator], Any]] = [
        lambda comm: require_agreement(comm, "forward pass", ("a",), lambda: {"a": 3}),
        lambda comm: require_same_text(comm, "generate", lambda: "x"),
        lambda comm: check_collectively(comm, "data", lambda: 1),
    ]
    found = raised(lambda comm: calls[comm.rank](comm))
    message = "the ranks of the group are in different calls at the same time: "
    assert found == [(AgreementError, found[0][1])] * 3
    assert found[0][1].startswith(message + "rank 0: forward pass; rank 1: generate; rank 2: data. Every rank")


@pytest.mark.parametrize(
    "check",
    [
        lambda comm, facts: require_agreement(comm, "pass", ("a",), facts),
        lambda comm, facts: require_same_text(comm, "pass", lambda: str(facts())),
    ],
)
def test_failed_description_raises_on_all_ranks(check: Callable[[Communicator, Callable[[], Any]], None]) -> None:
    failed = failing(ConfigError("bad"))
    (first, message), own, _ = raised(lambda comm: check(comm, failed if comm.rank == 1 else lambda: {"a": 1}))
    assert own == (ConfigError, "bad") and first is AgreementError
    assert message.startswith("pass: rank 1 of the group failed while checking its arguments")
    assert "This is rank 0" in message


def test_failure_of_one_rank_is_quoted_on_the_others() -> None:
    step, fine = failing(DataError("no such file: x.jsonl")), lambda: 1
    found = raised(lambda comm: check_collectively(comm, "arguments", step if comm.rank == 1 else fine))
    other = (AgreementError, "arguments: rank 1: no such file: x.jsonl")
    assert found == [other, (DataError, "no such file: x.jsonl"), other]


def printed(errors: list[Exception | None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process of each rank prints when `raise_on_all_ranks` ends it."""
    lines = []
    for rank, error in enumerate(outcomes(3, lambda comm: raise_on_all_ranks(comm, "data", errors[comm.rank]))):
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
    raise_on_all_ranks(as_communicator(), "arguments", None, {"sp": 1})
    with pytest.raises(ConfigError, match="bad"):
        raise_on_all_ranks(as_communicator(), "arguments", ConfigError("bad"))
