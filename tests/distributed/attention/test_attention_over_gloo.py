"""Layer: gloo ranks. Distributed attention over real processes, against dense float64."""

from __future__ import annotations

import pytest

from attention_cases import Case, assert_exact, over_gloo, same_bits
from ranks import ranks

pytestmark = pytest.mark.rounding

CROSS = [
    Case(op="lv"),
    Case(op="lv", mask="random", batch=2, groups=4),
    Case(op="lv", mask="growing", batch=2, shared_keys=True, groups=1),
    Case(op="lv", mask="one frame", table=True, tokens=2),
    Case(op="lv", mask="first frame", batch=2),
    Case(op="lv", mask="holes", batch=2, shared_keys=True),
    Case(op="lv", mask="some rows", frames=2),  # ranks without frames
    Case(op="lv", frames=1, tokens=1),  # a single key
    Case(op="lv", frames=1, tokens=2, mask="random"),  # one frame in all
    Case(op="lv", frames=3, tokens=1, batch=2),
    Case(op="lv", mask="nothing"),
]
RING = [Case(**{**vars(case), "op": "ring"}) for case in CROSS]
CAUSAL = [
    Case(op="causal", layout="zigzag", rows=24, batch=2),
    Case(op="causal", layout="striped", rows=24, groups=4),
    Case(op="causal", layout="contiguous", rows=24, groups=1),
    Case(op="causal", layout="zigzag", text="padded", rows=17, batch=2),
    Case(op="causal", layout="striped", text="packed", rows=17),
    Case(op="causal", layout="contiguous", text="window", rows=17, batch=2),
    Case(op="causal", layout="zigzag", rows=1),  # text shorter than the group
]
JOINT = [
    Case(op="joint", layout="zigzag", mask="growing", rows=19, batch=2, shared_keys=True),
    Case(op="joint", layout="striped", mask="holes", text="padded left", rows=19, batch=2),
    Case(op="joint", layout="contiguous", mask="one frame", text="window", rows=19, frames=2),
    Case(op="joint", layout="zigzag", text="packed", rows=3, frames=1, tokens=1),
]
OTHERS = [  # of the other strategies, what works on 4 ranks; `test_exact_loopback` has every tile
    Case(op="mesh", tile=(2, 2), mask="growing", batch=2, shared_keys=True, groups=1),
    Case(op="mesh", mask="random", batch=2, frames=3),
    Case(op="causal", by="mesh", tile=(2, 2), layout="striped", rows=24, batch=2),
    Case(op="causal", by="mesh", tile=(2, 2), text="padded", rows=17, batch=2),
    Case(op="ulysses", mask="random", batch=2),
    Case(op="ulysses", tile=(2, 1), groups=1, frames=3),
    Case(op="causal", by="ulysses", rows=24, batch=2),
    Case(op="joint", by="ulysses", frames_by="ulysses", tile=(1, 2), mask="holes", rows=19, batch=2, shared_keys=True),
    Case(op="joint", by="ulysses", mask="growing", text="padded left", rows=19, batch=2),
    Case(op="joint", by="mesh", frames_by="ulysses", mask="growing", rows=19, batch=2),
]
FEW = [CROSS[1], CROSS[7], RING[2], RING[6], CAUSAL[3], JOINT[0], JOINT[3]]


def of(case: Case, n: int) -> Case:
    """Cross-attention is for rows that are dealt out evenly; the other cases pad."""
    return case if case.op in ("causal", "joint") else Case(**{**vars(case), "rows": 6 * n, "layout": "contiguous"})


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name,cases", [("lv", CROSS), ("ring", RING), ("causal", CAUSAL), ("joint", JOINT)])
def test_exact(name: str, cases: list[Case], n: int) -> None:
    cases = [of(case, n) for case in cases]
    by_rank = ranks(n).run(over_gloo, cases)
    for i, case in enumerate(cases):
        assert_exact(case, [results[i] for results in by_rank])


@pytest.mark.parametrize("n", [5, 8])
def test_exact_in_larger_groups(n: int) -> None:
    cases = [of(case, n) for case in FEW]
    by_rank = ranks(n).run(over_gloo, cases, timeout=120)
    for i, case in enumerate(cases):
        assert_exact(case, [results[i] for results in by_rank])


def test_the_other_strategies() -> None:
    cases = [of(case, 4) for case in OTHERS]
    by_rank = ranks(4).run(over_gloo, cases)
    for i, case in enumerate(cases):
        assert_exact(case, [results[i] for results in by_rank])
    again = ranks(4).run(over_gloo, cases)
    serial = ranks(4).run(over_gloo, [Case(**{**vars(case), "overlap": False}) for case in cases])
    for i in range(len(cases)):
        assert same_bits([r[i] for r in by_rank], [r[i] for r in again])
        assert same_bits([r[i] for r in by_rank], [r[i] for r in serial])


def test_the_same_bits_run_to_run_and_with_or_without_overlap() -> None:
    cases = [of(case, 3) for case in FEW]
    first, second = ranks(3).run(over_gloo, cases), ranks(3).run(over_gloo, cases, again=2)
    serial = ranks(3).run(over_gloo, [Case(**{**vars(case), "overlap": False}) for case in cases])
    for i in range(len(cases)):
        assert same_bits([r[i] for r in first], [r[i] for r in second])
        assert same_bits([r[i] for r in first], [r[i] for r in serial])
