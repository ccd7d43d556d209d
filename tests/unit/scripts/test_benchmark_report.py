"""Layer: pure Python. The page of benchmarks agrees with the rows in the repository."""

import shutil
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_rows_with_different_columns_share_a_file(script, tmp_path: Path) -> None:
    rows = script("rows")
    rows.append(tmp_path / "x.csv", [{"a": 1, "b": 2.0}])
    rows.append(tmp_path / "x.csv", [{"a": 3, "c": "text, with a comma"}])
    assert rows.read(tmp_path / "x.csv") == [{"a": "1", "b": "2.0"}, {"a": "3", "c": "text, with a comma"}]
    assert rows.digits({"a": 1.23456789, "b": 3, "c": "x"}) == {"a": 1.2346, "b": 3, "c": "x"}


def test_page_has_the_tables_of_rows_or_says_that_there_are_none(script, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "benchmarks"
    shutil.copytree(DOCS / "benchmarks", folder)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the figures are those of the repository
    page = (DOCS / "benchmarks.md").read_text()
    report = script("report")
    assert all(f"<!-- rows: {name} -->" in page for name in report.PARTS)
    assert report.update(page, folder) == page
    page = "before\n<!-- rows: memory -->\nold\n<!-- end of rows -->\nafter\n"
    expected = "before\n<!-- rows: memory -->\n\nNo rows.\n\n<!-- end of rows -->\nafter\n"
    assert report.update(page, tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["network-tiles", "decode"])
def test_figures_are_drawn_from_rows(script, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    shutil.copy(DOCS / "benchmarks" / f"{name}.csv", tmp_path)
    assert f"/{name}.png)" in script("report").PARTS[name](tmp_path)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
