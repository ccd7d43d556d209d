"""Layer: gloo ranks. Every family by every strategy has the unpatched loss, logits, hidden states and gradients.

`ring`, `lv-xattn` and `local` have more cases in each family's own tests, Star Attention in `test_star`.
"""

from __future__ import annotations

import pytest
from harness import PATIENCE, check_case
from open_flamingo_cases import check, patched_rank, reference
from strategy_cases import FLAMINGO, WAYS
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
