"""Layer: one process, loopback ranks. Patched models of all families compute what the unpatched ones do.

Compared are the loss, logits, hidden states, the gradient of every parameter, and the tokens of `generate`.
"""

from typing import Any

import pytest

from family_cases import ON_FOUR_RANKS, exact_cases, strategy_cases
from family_harness import check_exact, check_tokens
from generation_cases import LATENTS, generated_cases


@pytest.mark.parametrize(("family", "size", "case"), list(exact_cases()))
def test_training_step_equals_unpatched(family: str, size: int, case: Any) -> None:
    check_exact(family, size, case)


@pytest.mark.parametrize(("family", "size", "case"), list(strategy_cases()))
def test_strategy_equals_unpatched(family: str, size: int, case: Any) -> None:
    check_exact(family, size, case)


@pytest.mark.parametrize(("family", "size", "case", "given"), list(generated_cases()))
def test_generated_tokens_equal_unpatched(family: str, size: int, case: Any, given: dict[str, Any]) -> None:
    check_tokens(family, size, case, given)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mesh 2x2", "ulysses", "hybrid", "replicate, K and V stored"])
def test_sharded_prompt_equals_unpatched_with_other_strategies(strategy: str) -> None:
    case = LATENTS.with_options(shard_prompt_from=2, **ON_FOUR_RANKS[strategy])
    check_tokens("idefics", 4, case, {"max_new_tokens": 4})
