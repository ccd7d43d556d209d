"""Layer: gloo ranks. Ranks that differ, or of which one failed, all raise the same message."""

import os

import pytest

from mllm_seqpar.cli.failure import describe
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.agreement import raise_on_all_ranks
from mllm_seqpar.errors import AgreementError, ConfigError, DataError
from ranks import ranks


def compare(rank: int, world: int, facts: list[dict], problems: list) -> None:
    raise_on_all_ranks(as_communicator(), "arguments", problems[rank], facts[rank])


def last_words(rank: int, world: int, problems: list) -> str:
    """What the process of a rank that `raise_on_all_ranks` ends would print."""
    os.environ["RANK"] = str(rank)
    try:
        raise_on_all_ranks(as_communicator(), "data", problems[rank])
    except Exception as error:
        return describe(error)[0]
    finally:
        del os.environ["RANK"]
    return "goes on"


def test_equal_facts_pass() -> None:
    ranks(3).run(compare, [{"sp": 1, "tile": None}] * 3, [None] * 3)


def test_a_difference_is_named_with_each_ranks_value() -> None:
    facts = [{"strategy": s, "sp": 2} for s in ("ring", "lv-xattn", "ring")]
    errors = ranks(3).errors(compare, facts, [None] * 3)
    assert all(isinstance(error, AgreementError) for error in errors)
    assert {str(error) for error in errors} == {
        "arguments: the ranks differ in strategy: ranks 0, 2: ring; rank 1: lv-xattn. "
        "Start all ranks with the same options and files"
    }


def test_a_problem_of_one_rank_reaches_all() -> None:
    errors = ranks(3).errors(compare, [{}] * 3, [None, DataError("no such file: x.jsonl"), None])
    assert [type(error) for error in errors] == [AgreementError, DataError, AgreementError]
    assert str(errors[1]) == "no such file: x.jsonl"
    assert str(errors[0]) == str(errors[2]) == "arguments: rank 1: no such file: x.jsonl"


@pytest.mark.parametrize("error", [ConfigError("the same")])
def test_a_problem_of_all_ranks_stays_what_it_is(error: ConfigError) -> None:
    assert [type(e) for e in ranks(2).errors(compare, [{}, {}], [error, error])] == [ConfigError, ConfigError]


def test_each_cause_is_printed_once() -> None:
    lost, gone = DataError("lost"), DataError("gone")
    for problems, printed in [
        ([None, None, None], ["goes on"] * 3),
        ([lost, lost, lost], ["error: lost", "", ""]),
        ([None, lost, gone], ["error: data: rank 1: lost; rank 2: gone", "", ""]),
        ([lost, None, gone], ["error: lost", "", "error: gone"]),
    ]:
        assert ranks(3).run(last_words, problems) == printed


def test_a_defect_keeps_its_traceback() -> None:
    printed = ranks(2).run(last_words, [None, KeyError("x")])
    assert printed[0] == "error: data: rank 1: KeyError: 'x'"
    assert printed[1].startswith("Traceback") and printed[1].endswith("KeyError: 'x'")


def gather(rank: int, world: int, texts: list[str]) -> list[str]:
    return as_communicator().gather_texts(texts[rank])


@pytest.mark.parametrize("texts", [["", "h\u00e9", "x" * 300], ["", "", ""]])
def test_texts_of_any_length_are_gathered(texts: list[str]) -> None:
    assert ranks(3).run(gather, texts) == [texts] * 3


def test_one_process_agrees_with_itself() -> None:
    raise_on_all_ranks(as_communicator(), "arguments", None, {"sp": 1})
    with pytest.raises(ConfigError, match="bad"):
        raise_on_all_ranks(as_communicator(), "arguments", ConfigError("bad"))
