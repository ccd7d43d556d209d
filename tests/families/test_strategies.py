"""Layer: gloo ranks. Every family by every strategy has the unpatched loss, logits, hidden states and gradients.

`ring`, `lv-xattn` and `local` have more cases in each family's own tests, Star Attention in `test_star`.
"""

from __future__ import annotations

import pytest
from harness import PATIENCE, check_case, check_tokens
from open_flamingo_cases import check, patched_rank, reference
from strategy_cases import FLAMINGO, THREE_HEADS, WAYS
from tiny_open_flamingo import LANGUAGE_MODELS

from ranks import ranks

FOUR_HEADS = [name for name in LANGUAGE_MODELS if name != "mpt"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["strategies_of_idefics", "strategies_of_mllama"])
def test_equals_unpatched(family: str, way: str) -> None:
    check_case(family, "CASES", way, 4)


@pytest.mark.parametrize("way", WAYS)
def test_open_flamingo_equals_unpatched(way: str) -> None:
    name, case = FOUR_HEADS[list(WAYS).index(way) % 3], FLAMINGO[way]
    check(ranks(4).run(patched_rank, name, case, timeout=PATIENCE), reference(name, case), case)


@pytest.mark.parametrize("way", THREE_HEADS)
def test_biases_of_dealt_heads(way: str) -> None:
    """MPT's ALiBi is another for every head."""
    case = THREE_HEADS[way]
    check(ranks(3).run(patched_rank, "mpt", case, timeout=PATIENCE), reference("mpt", case), case)


def test_long_prompts_by_every_strategy() -> None:
    check_tokens("strategies_of_idefics", "GENERATED", 4)
