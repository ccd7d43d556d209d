"""Layer: one process. The benchmark of decoding, small."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROWS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"


@pytest.fixture
def small(script, monkeypatch: pytest.MonkeyPatch):
    models = script("models")
    monkeypatch.setattr(models, "SMALL", replace(models.SMALL, width=64))
    return script


def measured(decode, family: str, images: int) -> dict:
    return decode.measure(family, images, decode.parse("--tokens 5 --prompt 4 --repeats 1 --device cpu".split()))


@pytest.mark.parametrize("family", ["idefics", "open_flamingo"])
def test_patched_decoding_gives_unpatched_tokens_and_a_row(small, family: str) -> None:
    if family.startswith("open_flamingo") and importlib.util.find_spec("open_flamingo") is None:
        pytest.skip("open_flamingo is installed with --no-deps by scripts/test.sh")
    row = measured(small("decode"), family, 3)
    assert row["visual_keys"] == 3 * 64
    assert row["ratio"] == pytest.approx(row["unpatched_s_per_token"] / row["patched_s_per_token"], rel=1e-3)
    columns = small("harness").read(ROWS / "decode.jsonl")[0].keys()
    assert set(row) | {"torch", "commit", "hardware", "threads", "transformers"} == columns
    assert f"| {family} | 3 | 192 |" in small("report").decoding_table([row])


def test_different_tokens_stop_the_decoding_benchmark(small, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = small("decode")
    monkeypatch.setattr(decode, "decode_patched", lambda *_: (torch.zeros(1, 5, dtype=torch.long), [1.0] * 5))
    with pytest.raises(SystemExit, match="idefics: tokens"):
        measured(decode, "idefics", 1)
