"""Layer: gloo ranks. Patched Llama 3.2 Vision gives the unpatched loss, logits, hidden states, gradients and tokens."""

import pytest
from harness import check_case, check_tokens
from mllama_cases import EVERYWHERE, ONCE

FAMILY = "mllama_cases"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("case", EVERYWHERE)
def test_mllama_equals_unpatched(world: int, case: str) -> None:
    check_case(FAMILY, "EVERYWHERE", case, world)


@pytest.mark.parametrize(("world", "case"), sorted((2 + i % 3, case) for i, case in enumerate(ONCE)))
def test_mllama_equals_unpatched_in(world: int, case: str) -> None:
    check_case(FAMILY, "ONCE", case, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_mllama_generates_the_same_tokens(world: int) -> None:
    check_tokens(FAMILY, "GENERATED", world)
