"""Layer: one process. The page of benchmarks says what the rows say, and is what the rows in the repository make."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "scripts" / "bench"
MODULES = ("report", "report_decode", "report_memory", "report_model_step", "report_network", "rows", "run_all")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def network_row(mode: str, tile: str, seconds: float, predicted: float, **more: object) -> dict[str, object]:
    row = {"benchmark": "network", "setting": "s", "ranks": 4, "rows": 1, "keys": 9, "heads": 8, "kv_heads": 2}
    row |= {"dim": 64, "dtype": "bfloat16", "block_ms": 10.0, "cap_mbit": 100.0, "link_mbit": 95.0, "mode": mode}
    row |= {"tile": tile, "seconds": seconds, "least_s": seconds, "most_s": seconds, "over_none": seconds / 2.0}
    return row | {"sent_bytes": 1_000_000, "predicted_s": predicted, "hardware": "a machine", "commit": "abc"} | more


def test_rows_with_other_columns_share_a_file(bench, tmp_path: Path) -> None:
    rows = bench("rows")
    rows.append(tmp_path / "x.csv", [{"a": 1, "b": 2.0}])
    rows.append(tmp_path / "x.csv", [{"a": 3, "c": "text, with a comma"}])
    found = rows.read(tmp_path / "x.csv")
    assert found == [{"a": "1", "b": "2.0"}, {"a": "3", "c": "text, with a comma"}]
    assert rows.digits({"a": 1.23456789, "b": 3, "c": "x"}) == {"a": 1.2346, "b": 3, "c": "x"}


def test_network_section(bench, tmp_path: Path) -> None:
    paper = {"paper_model": "M", "paper_cluster": "A30", "paper_gpus": 8, "paper_rows": 1024, "paper_keys": 4096}
    paper |= {"paper_ring_s": 30.0, "paper_lv_xattn_s": 2.0}
    modes = [("none", "", 2.0, 2.0), ("lv-xattn", "4x1", 2.1, 2.0), ("ring", "1x4", 8.4, 8.0)]
    modes.append(("ring, expanded", "1x4", 21.0, 24.0))
    rows = [network_row(*mode, **paper) for mode in modes]
    bench("rows").append(tmp_path / "network-paper.csv", rows)
    tiles = [network_row("none", "", 2.0, 2.0)]
    tiles += [network_row(f"tile {t}", t, *times) for t, times in {"4x1": (3, 3), "2x2": (2, 4), "1x4": (1, 2)}.items()]
    bench("rows").append(tmp_path / "network-tiles.csv", tiles)
    text = bench("report_network").section(tmp_path)
    assert "| s | 4.00 | 4.00 | 10.00 | 12.00 | 15.00 | 1.050 |" in text
    assert "| lv-xattn | 2100.0 | 2100.0 | 2100.0 | 1.050 | 1.00 | 2000.0 |" in text
    assert "| s | 4x1: 3000, 2x2: 2000, 1x4: 1000 | 4x1: 3000, 2x2: 4000, 1x4: 2000 | 1x4 | 1 of 3 |" in text
    assert "Measured on hardware a machine, commit abc." in text


def test_a_page_of_what_there_is(bench, tmp_path: Path) -> None:
    step = {"family": "idefics", "ranks": 2, "step_s": 0.5, "cross_share": 0.25, "rest_share": 0.75, "torch": "9"}
    rows = [step | {"who": "patched", "ratio": 1.25}, step | {"who": "unpatched", "ranks": 1}]
    bench("rows").append(tmp_path / "model_step.csv", rows)
    page = bench("run_all").written(tmp_path)
    assert "## A training step" in page and "Measured on torch 9." in page
    assert "| family | ranks |  | step, s | times | cross | rest |" in page
    assert "| idefics | 2 | patched | 0.500 | 1.25 | 25.0% | 75.0% |" in page
    assert "## Memory" not in page


def test_a_video_that_the_text_ends_is_a_least(bench, tmp_path: Path) -> None:
    common = {"family": "f", "model": "m", "ranks": 1, "scale": 8, "text": 64, "dtype": "bfloat16", "device": "cpu"}
    common |= {"strategy": "ring", "frames": 4, "kept_bytes": 1, "peak_bytes": 2, "planned_bytes": 3}
    rows = [common | {"measure": "bytes", "recompute": again} for again in (False, True)]
    largest = [row | {"measure": "largest", "frames": 8 * (2 - again)} for again, row in enumerate(rows)]
    largest[1] |= {"frames": 56, "longer": 3.5, "capped": True}
    bench("rows").append(tmp_path / "memory.csv", [*rows, *largest])
    page = bench("report_memory").section(tmp_path)
    assert "| 1 | ring | kept | 4 | 0.00 | 0.00 | 0.00 | 16 |  |" in page
    assert "| 1 | ring | again | 4 | 0.00 | 0.00 | 0.00 | >= 56 | >= 3.50 |" in page
    assert "|---:|---|---|---:|---:|---:|---:|---:|---:|" in page.replace(" ", "")


def test_the_page_in_the_repository_is_that_of_its_rows(bench, tmp_path: Path) -> None:
    kept = ROOT / "docs" / "benchmarks"
    if not kept.exists():
        pytest.skip("no rows are kept in this checkout")
    folder = tmp_path / "benchmarks"
    shutil.copytree(kept, folder)  # with its figures, so that the page is the same where there is no matplotlib
    assert bench("run_all").written(folder) == (ROOT / "docs" / "benchmarks.md").read_text()
