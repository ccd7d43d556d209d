"""Layer: gloo ranks. Ranks that differ, or of which one failed, all raise the same message."""

import pytest

from mllm_seqpar.errors import AgreementError, ConfigError, DataError
from mllm_seqpar.training.agreement import require_agreement
from ranks import ranks


def compare(rank: int, world: int, facts: list[dict], problems: list) -> None:
    require_agreement("arguments", facts[rank], problems[rank])


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
    errors = ranks(2).errors(compare, [{}, {}], [None, DataError("no such file: x.jsonl")])
    assert all(isinstance(error, AgreementError) for error in errors)
    assert {str(error) for error in errors} == {"arguments: rank 1: no such file: x.jsonl"}


@pytest.mark.parametrize("error", [ConfigError("the same")])
def test_a_problem_of_all_ranks_stays_what_it_is(error: ConfigError) -> None:
    assert [type(e) for e in ranks(2).errors(compare, [{}, {}], [error, error])] == [ConfigError, ConfigError]
