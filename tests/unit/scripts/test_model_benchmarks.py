"""Layer: one process. The benchmark of one process, small."""

import importlib.util
from dataclasses import replace

import pytest

from launch import ROOT

ROWS = ROOT / "docs" / "benchmarks"


@pytest.fixture
def small(script, monkeypatch: pytest.MonkeyPatch):
    models = script("models")
    monkeypatch.setattr(models, "SMALL", replace(models.SMALL, width=64))
    return script


def measured(one_process, family: str, images: int) -> list[dict]:
    options = "--wide --runs forward decode --tokens 5 --prompt 4 --repeats 1 --device cpu"
    return [*one_process.measure(family, images, one_process.parse(options.split()))]


@pytest.mark.parametrize("family", ["idefics", "open_flamingo"])
def test_patched_model_gives_unpatched_results_and_rows(small, family: str) -> None:
    if family.startswith("open_flamingo") and importlib.util.find_spec("open_flamingo") is None:
        pytest.skip("open_flamingo is installed with --no-deps by scripts/test.sh")
    rows = measured(small("one_process"), family, 3)
    assert [row["run"] for row in rows] == ["forward", "prompt", "token"]
    assert all(row["visual_keys"] == 3 * 64 for row in rows)
    assert all(row["ratio"] == pytest.approx(row["patched_s"] / row["unpatched_s"], rel=1e-3) for row in rows)
    columns = small("harness").read(ROWS / "decode.jsonl")[0].keys()
    machine = {"torch", "commit", "hardware", "threads", "transformers"}
    assert set(rows[0]) | machine == columns | {"lower", "upper", "extra_us_per_layer"}
    assert f"| {family} | 3 | 192 |" in small("report").decoding_table(rows[1:])


def test_different_results_stop_the_benchmark(small, monkeypatch: pytest.MonkeyPatch) -> None:
    one_process = small("one_process")
    for name, run in one_process.RUNS.items():

        def other(made, clock, run=run, **options):
            seconds, result = run(made, clock, **options)
            return seconds, result + options["patched"]

        monkeypatch.setitem(one_process.RUNS, name, other)
        options = one_process.parse(f"--wide --runs {name} --tokens 5 --prompt 4 --repeats 1 --device cpu".split())
        with pytest.raises(SystemExit, match=f"idefics, {name}: results of the patched model differ"):
            list(one_process.measure("idefics", 1, options))
