"""Layer: one process. The benchmarks of whole models, small: decoding and the profile of a training step."""

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


@pytest.mark.parametrize("family", ["idefics", "open_flamingo_all"])
def test_patched_decoding_gives_unpatched_tokens_and_a_row(small, family: str) -> None:
    if family.startswith("open_flamingo") and importlib.util.find_spec("open_flamingo") is None:
        pytest.skip("open_flamingo is installed with --no-deps by scripts/test.sh")
    row = measured(small("decode"), family, 3)
    assert row["visual_keys"] == 3 * 64
    assert row["ratio"] == pytest.approx(row["unpatched_s_per_token"] / row["patched_s_per_token"], rel=1e-3)
    columns = small("rows").read(ROWS / "decode.csv")[0].keys()
    assert set(row) | {"torch", "commit", "hardware", "threads", "transformers"} == columns
    assert f"| {family} | 3 | 192 | 1 |" in small("report").decoding_table(small("rows").as_text([row]))


def test_different_tokens_stop_the_decoding_benchmark(small, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = small("decode")
    monkeypatch.setattr(decode, "decode_patched", lambda *_: (torch.zeros(1, 5, dtype=torch.long), [1.0] * 5))
    with pytest.raises(SystemExit, match="idefics: tokens"):
        measured(decode, "idefics", 1)


def test_different_loss_stops_the_profile(small, monkeypatch: pytest.MonkeyPatch) -> None:
    profile_step = small("profile_step")
    results = iter([(1.0, 2.001, 3.0), (1.0, 2.0, 3.0)])
    monkeypatch.setattr(profile_step, "train_step", lambda *_: next(results))
    args = profile_step.parse(["--images", "1", "--words", "4", "--device", "cpu"])
    with pytest.raises(SystemExit, match="idefics, 1 ranks: loss 2.001; the unpatched model's is 2.0"):
        profile_step.profile_family("idefics", args)
