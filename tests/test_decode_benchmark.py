"""Layer: one process. The decoding benchmark, small: every family decodes the unpatched tokens, and its rows add up."""

import argparse
import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
FAMILIES = ("idefics", "open_flamingo", "open_flamingo_all", "mllama", "mplug_owl3")


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(importlib.import_module("decode_models"), "WIDTH", 64)
    yield importlib.import_module("decode")
    for name in ("decode", "decode_models", "measure"):
        sys.modules.pop(name, None)


def settings(**given: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"tokens": 5, "prompt": 4, "ranks": 1, "repeats": 1, "threads": 1, "device": "cpu"} | given
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(decode, family: str, tmp_path: Path) -> None:
    if family.startswith("open_flamingo") and importlib.util.find_spec("open_flamingo") is None:
        pytest.skip("open_flamingo is installed with --no-deps by scripts/test.sh")
    one, other = (decode.subject_of(family, 3, settings()).model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)  # ranks build their own
    row = decode.measured(family, 3, settings())
    assert row["visual_keys"] >= 3 * 64
    assert row["ratio"] == pytest.approx(row["unpatched_s_per_token"] / row["patched_s_per_token"], rel=1e-3)
    decode.append(tmp_path / "rows.csv", row)
    decode.append(tmp_path / "rows.csv", row)
    with open(tmp_path / "rows.csv") as file:
        assert [found["family"] for found in csv.DictReader(file)] == [family, family]
    assert len(decode.text(row)) == len(decode.HEAD)


def test_other_tokens_are_no_result(decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "once_patched", lambda subject, args: (torch.zeros(1, 5, dtype=torch.long), [1.0] * 5))
    with pytest.raises(SystemExit, match="idefics: other tokens"):
        decode.measured("idefics", 1, settings())


def test_medians(decode) -> None:
    runs = [(torch.zeros(1, 5), [9.0, 1.0, 1.0, 2.0, 2.0]), (torch.zeros(1, 5), [7.0, 1.0, 1.0, 2.0, 2.0])]
    found = decode.summary(runs, [(tokens, [2 * x for x in times]) for tokens, times in runs])
    assert found["unpatched_prompt_s"] == 8 and found["unpatched_s_per_token"] == 1.5
    assert found["patched_growth"] == 2 and found["ratio"] == 0.5
